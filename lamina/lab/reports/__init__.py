"""Records of runs, verdicts on claims, figures and pages. No module here imports torch at its top."""
