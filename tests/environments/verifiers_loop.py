"""An environment of verifiers, in the file that is named, with turns of the model that are given. Prints JSON: the
context before each turn, and how the conversation ended. Runs in a Python that has verifiers."""

import json
import os
import sys
from functools import partial
from hashlib import sha256
from pathlib import Path

from rldsl.diag import Failure
from rldsl.plan.function import Function
from rldsl.plan.payloads import Sampling
from rldsl.runtime.environments.chat import ChatTemplate
from rldsl.runtime.environments.processes import EnvironmentProcesses
from rldsl.runtime.environments.requests import Rules
from tests.environments.families import FAMILIES, ends, make

FAMILY = FAMILIES["Qwen2.5"]
TOKENIZER = make(FAMILY)
ENDS = ends(TOKENIZER, FAMILY)


def digest(path):
    return sha256(Path(path).read_bytes()).hexdigest()


def conversation(talk, row, turns):
    talk.begin(0, row, row["prompt"], 1)
    contexts = []
    try:
        for turn in [*turns, None]:
            (arrival,) = talk.arrivals(wait=True)
            if arrival.ended:
                return {"contexts": contexts, "stopped": arrival.stopped, "reward": arrival.reward}
            contexts.append(TOKENIZER.decode(list(arrival.tokens)))
            if turn is None:
                talk.finish(0, "max_turns")
                (arrival,) = talk.arrivals(wait=True)
                return {"contexts": contexts, "stopped": arrival.stopped, "reward": arrival.reward}
            ids = TOKENIZER(turn + "<|im_end|>", add_special_tokens=False)["input_ids"]
            talk.said(0, ids, False, [-1.0] * len(ids))
    except Failure as failure:
        return {"contexts": contexts, "code": failure.diagnostics[0].code, "title": failure.diagnostics[0].title}


if __name__ == "__main__":
    path, name = sys.argv[1:3]
    function = Function("f", os.path.relpath(path), name, digest(path), "env")
    rules = Rules(Sampling(max_new_tokens=100), frozenset(ENDS), 3, 2000, 1 << 20)
    with EnvironmentProcesses(function, 240.0, rules=rules).open(partial(ChatTemplate, TOKENIZER, ENDS, "tok")) as talk:
        print("RESULT" + json.dumps([conversation(talk, *one) for one in json.loads(sys.argv[3])]))
