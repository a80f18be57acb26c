"""Trackers, which copy the record of a run to tracking tools or to a custom tracker."""
