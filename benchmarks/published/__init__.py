"""Published steps of RL systems, and what the simulator says of them beforehand."""
