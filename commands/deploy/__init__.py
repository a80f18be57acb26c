"""Deploy a federation: certificates, the SuperLink, warm SuperNodes, and the submission of runs."""
