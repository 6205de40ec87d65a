"""Resharding: how a model's parameters get from one layout to another. Which bytes travel between which ranks, and
when.

The field also says refit or weight sync; ReaL, and the plan's event `realloc`, say reallocation.

A box class is every box that the same ranks hold before and the same ranks want afterwards (`box_classes.py`).
`node_groups.py` groups nodes whose devices hold and want the same. `planning.py` chooses who sends each class to each
group, with `intra_node.py` for the copies inside a node and `broadcast_trees.py` for long chains of nodes;
`transfer_slices.py` derives what one rank sends and receives, and `rounds.py` cuts that into messages. All of it is
integer arithmetic on degrees, so 10,240 ranks cost about what 64 do.
"""
