"""Play scripted turns through TRL's loop of tool calls, with its chat and response templates; needs a Python with TRL.

    python trl_tools.py FOLDER

FOLDER   a tokenizer for each family in FOLDER/NAME; the templates of TRL are saved there. FOLDER/tools.py has the environment
         Worth, whose method multiply is the tool, and the reward function worth

The last line of output is JSON: for each case the family, the ids of prompt, turns and completion, the mask, and the rewards of
the function and of the environment.
"""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import get_json_schema
from trl import GRPOTrainer
from trl import chat_template_utils as theirs

sys.path.insert(0, sys.argv[1])
mine = importlib.import_module("tools")
TEMPLATES = {
    "hermes": "qwen2_5",
    "qwen3": "qwen3",
    "nemotron": "nemotron_3_nano",
    "llama": "llama3_1",
    "gpt_oss": "gptoss",
    "gemma": "gemma4_v5",
    "glm": "glm4moe",
    "lfm": "lfm2_2_5_v2",
}
ASKED = [{"role": "user", "content": "12 times 34?"}]
ODD = (
    '<tool_call>\n{"name": "multiply", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call>',
    '<tool_call>\n{"name": "divide", "arguments": {"a": 1}}\n</tool_call>',
    '<tool_call>\n{"name": "multiply", "arguments": {"a": 1, "c": 2}}\n</tool_call>',
    '<tool_call>\n{"name": "multiply", "arguments": {"a": 1,\n</tool_call>',
    '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>',
    '<tool_call>\n{"name": "multiply", "arguments": {"a": "4", "b": 2}}\n</tool_call>',
)


def played(tokenizer: Any, prompt: list[int], turns: list[list[int]]) -> dict[str, Any]:
    """What TRL makes of these turns."""
    rest, environment = iter(turns[1:]), mine.Worth()
    environment.reset()

    def get_reward(environments: Any, **_: Any) -> list[float]:  # as its constructor makes it
        return [one.get_reward() for one in environments]

    trainer = object.__new__(GRPOTrainer)
    trainer.__dict__.update(
        max_tool_calling_iterations=9,
        _sync_tool_dicts=[{"multiply": environment.multiply}],
        _async_tool_dicts=[{}],
        tools=[environment.multiply],
        environment_factories=None,
        environments=[environment],
        reward_funcs=[mine.worth, get_reward],
        reward_func_names=["worth", "Worth"],
        reward_processing_classes=[None, None],
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(report_to=[]),
        _log_completion_extra=None,
        _log_metric=None,
        _current_train_step_time=0.0,
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template=None
        if theirs.is_chat_template_prefix_preserving(tokenizer)
        else theirs.get_training_chat_template(tokenizer),
        chat_template_kwargs={},
        _is_vlm=False,
        use_vllm=False,
        max_completion_length=9_999,
    )
    trainer.__dict__["model"] = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=9_999))
    trainer.__dict__["_generate_single_turn"] = lambda *_, **__: ([list(next(rest))], None)
    first = theirs.parse_response(tokenizer, turns[0], prefix=prompt, tools=[environment.multiply])
    try:
        mask, said, ids, *_ = trainer._tool_call_loop([list(ASKED)], [prompt], [list(turns[0])], [[first]], None, None, {})
    except ValueError as error:
        return {"error": str(error)}
    rewards = trainer._calculate_rewards([{"prompt": ASKED}], [list(ASKED)], said, ids)[0].tolist()
    return {"prompt": prompt, "turns": turns, "ids": ids[0], "mask": mask[0], "rewards": rewards}


def main(folder: Path) -> None:
    cases = []
    for family, template in TEMPLATES.items():
        tokenizer = AutoTokenizer.from_pretrained(folder / family)
        tokenizer.chat_template = (theirs._CHAT_TEMPLATES_DIR / f"{template}.jinja").read_text("utf-8")
        theirs.add_response_schema(tokenizer)
        tokenizer.save_pretrained(folder / family)
        eos = set(json.loads((folder / family / "eos.json").read_text()))

        def rendered(messages: Any, tokenizer: Any = tokenizer, **options: Any) -> list[int]:
            return list(
                tokenizer.apply_chat_template(
                    messages, tools=[get_json_schema(mine.Worth().multiply)], return_dict=False, **options
                )
            )

        call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 12, "b": 34}}}
        said = ({"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "assistant", "content": "408"})
        prompt, turns = rendered(ASKED, add_generation_prompt=True), []
        for message in said:
            whole = rendered([*ASKED, message])
            shared = next((place for place, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
            own = whole[shared:]
            end = next((place for place, token in enumerate(own) if token in eos), len(own))
            turns.append([*own[:end], own[end] if end < len(own) else max(eos)])
        cases.append({"family": family, **played(tokenizer, prompt, turns)})
        for text in ODD if family == "qwen3" else ():
            odd = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            cases.append({"family": family, **played(tokenizer, prompt, [odd, turns[1]])})
    print(json.dumps(cases))


main(Path(sys.argv[1]))
