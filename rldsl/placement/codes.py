"""Every code of placement (RL03xx) and memory (RL04xx) with its meaning. A code is never given a second meaning."""

CODES: dict[str, str] = {
    "RL0301": "no model directory",
    "RL0302": "a model directory lacks a file or a tensor",
    "RL0303": "a model's config cannot be used",
    "RL0304": "degrees do not fill the mesh",
    "RL0305": "a mesh reaches beyond the cluster",
    "RL0306": "a mesh is neither whole nodes nor a dividing part of one",
    "RL0307": "tp does not fit the model",
    "RL0308": "pp does not fit the model",
    "RL0309": "tp reaches beyond a node",
    "RL0310": "unknown placement option",
    "RL0311": "a placement option has a wrong value",
    "RL0312": "a placement that is not supported yet",
    "RL0313": "a selector matches nothing",
    "RL0314": "two rules of the same rank place one call",
    "RL0315": "a model is trained under two layouts",
    "RL0316": "models that read the same tokens have different tokenizers",
    "RL0317": "offload of a model that is trained",
    "RL0319": "a model is saved that no call uses",
    "RL0401": "a rank needs more memory than a device has",
}
