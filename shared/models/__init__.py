"""Models: the generator over semantic ids, SASRec and popularity as baselines."""
