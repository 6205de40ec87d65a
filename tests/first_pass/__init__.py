"""Losses that need the whole minibatch at once, for which a pass without gradient comes first."""
