"""The options of ReaL's script, read by ReaL's own configuration: what its `quickstart` does before it looks for GPUs.

In: arguments such as `ppo.kl_ctl=0.1`. Out: for each the value that ReaL's configuration then has, as JSON; ends with
an exception if it has no such option, or not of such a value.
"""

from __future__ import annotations

import json
import sys

import serve_real  # noqa: F401 - replaces what ReaL imports for other purposes
from omegaconf import OmegaConf
from realhf.experiments.common.ppo_exp import PPOConfig

config = OmegaConf.merge(OmegaConf.structured(PPOConfig), OmegaConf.from_dotlist(sys.argv[1:]))
print(json.dumps({name: OmegaConf.select(config, name) for name in (a.partition("=")[0] for a in sys.argv[1:])}))
