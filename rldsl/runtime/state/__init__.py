"""What a rank holds during a run: an immutable context, shards of models, the values of a step, readers of data."""
