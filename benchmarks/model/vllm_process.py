"""vLLM, asked by lines of JSON: run by the interpreter of vLLM's own environment, by its path, without our packages.

`python vllm_process.py ENGINE_ARGUMENTS` (JSON) loads the model, says `{}`, and answers each line of its input,
`{"prompts": [[id, …], …], "tokens": n}`, with a list of tokens for each: greedy, all at once, exactly n of them.
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
        asked = json.loads(line)
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in asked["prompts"]]
        parameters = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False)
        found = llm.generate(prompts, parameters, use_tqdm=False)
        print(json.dumps([list(one.outputs[0].token_ids) for one in found]), file=answers)


if __name__ == "__main__":
    main()
