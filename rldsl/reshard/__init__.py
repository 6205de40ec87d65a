"""How a model's parameters get from one layout to another: which bytes travel between which ranks, and when."""
