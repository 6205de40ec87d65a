"""What `rlc profile` times on a machine, with a backend and random weights: no plan, no run; only configs are read."""
