"""Placement: every call of a graph gets a mesh and degrees that its model can carry."""
