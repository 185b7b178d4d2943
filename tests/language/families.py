"""How ten families of models write calls of tools and read results: tokenizers with their control tokens, and their formats.

The templates are reduced to what surrounds calls and results; the control tokens are those of the published tokenizers.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from surefoot.language.data.tokens import Tokens

FAMILIES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
"""templates around calls and results, control tokens and response templates"""


def chat_template(of: dict[str, Any]) -> str:
    """A family's template."""
    calls = of.get("calls") or f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{of['call']}{{% endfor %}}"
    before, after = of.get("results", "{0}").split("{0}")
    first = "{% if messages[loop.index0 - 1].role != 'tool' %}"
    last = "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    result = f"{first}{before}{{% endif %}}{of['result']}{last}{after}{{% endif %}}"
    opening, then = of["opening"], of.get("after", of["opening"])
    opened = f"{{% if loop.index0 and messages[loop.index0 - 1].role == 'tool' %}}{then}{{% else %}}{opening}{{% endif %}}"
    said = of.get("said", "{{ m.content }}")
    called = f"{opened}{calls}{of.get('calls_end', of['end'])}"
    roles = f"{{% if m.role == 'user' %}}{of['user']}{{% elif m.role == 'tool' %}}{result}{{% elif m.tool_calls %}}{called}"
    begins = f"{{% if messages[-1].role == 'tool' %}}{then}{{% else %}}{opening}{{% endif %}}"
    return (
        f"{of.get('begin', '')}{{% for m in messages %}}{roles}{{% else %}}{opened}{said}{of['end']}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{begins}{{% endif %}}"
    )


@cache
def family_tokens(name: str) -> Tokens:
    """A tokenizer of bytes and a few merges, with a family's control tokens, chat template and response template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    of = FAMILIES[name]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = "multiply assistant arguments name function user 12 34 408 parameter"
    core.train_from_iterator(
        [words] * 9, trainers.BpeTrainer(vocab_size=320, initial_alphabet=sorted(alphabet), show_progress=False)
    )
    core.add_special_tokens([AddedToken(token, special=True) for token in of["special"].split()])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in of.get("added", "").split()])
    eos = of["eos"].split()
    anchor = {"start_anchor_pattern": of["anchor"]} if "anchor" in of else {"start_anchor": of["opening"]}
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=eos[0],
        chat_template=chat_template(of),
        response_template={**anchor, "fields": {"tool_calls": of["read"], "content": of.get("content", {})}},
        clean_up_tokenization_spaces=False,
    )
    tokens = Tokens(made)
    tokens.eos_ids = tuple(made.convert_tokens_to_ids(token) for token in eos)
    return tokens
