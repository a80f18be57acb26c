"""Where else the record of a run goes: to tools that people use already, or to something of their own."""
