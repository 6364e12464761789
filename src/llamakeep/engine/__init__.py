"""Many requests on one model: slots that share batches, over the prefix tree."""
