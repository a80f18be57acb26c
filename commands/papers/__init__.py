"""The papers' tables and figures: run again, and set beside what the papers print."""
