"""vLLM subprocess with a JSON-lines protocol. Run by path with the interpreter of vLLM's environment, without our
packages.

`python vllm_process.py ENGINE_ARGUMENTS` (JSON) loads the model and writes `{}`. It answers each input line
`{"prompts": [[id, …], …], "tokens": n}` with a list of exactly n greedy tokens per prompt, computed in one batch.
"""

import json
import os
import sys


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM's processes log to their standard output
    llm = LLM(**json.loads(sys.argv[1]))
    print("{}", file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in request["prompts"]]
        parameters = SamplingParams(temperature=0, max_tokens=request["tokens"], ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        print(json.dumps([list(one.outputs[0].token_ids) for one in outputs]), file=answers)


if __name__ == "__main__":
    main()
