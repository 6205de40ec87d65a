"""The description of models: what a model directory says without a weight being read."""
