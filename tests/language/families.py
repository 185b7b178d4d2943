"""How ten families of models write calls of tools and read results: tokenizers with their control tokens, and their formats.

The templates are reduced to what surrounds calls and results; the control tokens are those of the published tokenizers.
"""

# ruff: noqa: E501
from functools import cache
from typing import Any

from surefoot.language.data.tokens import Tokens

JSON_CALL = {"repeats": True, "content": "json", "transform": {"type": "function", "function": "{content}"}}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
CHATML = {"user": "<|im_start|>user\n{{ m.content }}<|im_end|>\n", "opening": "<|im_start|>assistant\n", "end": "<|im_end|>\n"}
CHATML_RESULT = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
XML = {
    "call": "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>",
    "read": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
        "close_pattern": r"</tool_call>\s*",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
        "transform": NAMED,
    },
}
QWEN = (
    "<|im_start|> <|im_end|> <|endoftext|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> "
    "<|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
)
FIM = " <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"
PLAIN = "{{ f.arguments | tojson }}"

FAMILIES: dict[str, dict[str, Any]] = {
    "hermes": {
        **CHATML,
        "special": QWEN,
        "added": "<tool_call> </tool_call>" + FIM,
        "eos": "<|im_end|> <|endoftext|>",
        "call": f'<tool_call>\n{{"name": "{{{{ f.name }}}}", "arguments": {PLAIN}}}\n</tool_call>',
        "result": CHATML_RESULT,
        "read": {"open": "<tool_call>", "close_pattern": r"</tool_call>\s*", **JSON_CALL},
    },
    "qwen3": {
        **CHATML,
        **XML,
        "special": QWEN,
        "added": "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>" + FIM,
        "eos": "<|im_end|> <|endoftext|>",
        "opening": "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "result": CHATML_RESULT,
    },
    "nemotron": {
        **CHATML,
        **XML,
        "special": "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] "
        "[TOOL_CALLS] <|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call>",
        "eos": "<|im_end|> </s>",
        "opening": "<|im_start|>assistant\n<think></think>",
        "result": CHATML_RESULT,
    },
    "llama": {
        "special": "<|begin_of_text|> <|end_of_text|> <|finetune_right_pad_id|> <|start_header_id|> <|end_header_id|> <|eom_id|> "
        "<|eot_id|> <|python_tag|>",
        "eos": "<|eot_id|> <|end_of_text|> <|eom_id|>",
        "begin": "<|begin_of_text|>",
        "user": "<|start_header_id|>user<|end_header_id|>\n\n{{ m.content }}<|eot_id|>",
        "opening": "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "call": f'{{"name": "{{{{ f.name }}}}", "parameters": {PLAIN}}}',
        "end": "<|eot_id|>",
        "result": "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>",
        "read": {
            "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
            "close_pattern": r"\}(?:<\|eot_id\|>|<\|eom_id\|>|\Z)",
            "content": "json",
            "repeats": True,
            "transform": NAMED,
        },
    },
    "mistral": {
        "special": "<unk> <s> </s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        "eos": "</s>",
        "begin": "<s>",
        "user": "[INST] {{ m.content }}[/INST]",
        "opening": "",
        "calls": "[TOOL_CALLS] [{% for c in m.tool_calls %}{% set f = c.function %}"
        f'{{"name": "{{{{ f.name }}}}", "arguments": {PLAIN}, "id": "{{{{ c.id }}}}"}}'
        "{{ ', ' if not loop.last }}{% endfor %}]",
        "end": "</s>",
        "result": '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]',
        "anchor": r"\[/INST\]|\[/TOOL_RESULTS\]",
        "read": {
            "open": "[TOOL_CALLS]",
            "close_pattern": r"</s>|\Z",
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        },
    },
    "deepseek": {
        "special": "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜> <|EOT|>",
        "added": "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> "
        "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜>",
        "eos": "<｜end▁of▁sentence｜>",
        "begin": "<｜begin▁of▁sentence｜>",
        "user": "<｜User｜>{{ m.content }}",
        "opening": "<｜Assistant｜>",
        "after": "",
        "calls": "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}{% set f = c.function %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        "{{ f.name }}\n```json\n{{ f.arguments + '' }}\n```<｜tool▁call▁end｜>{{ '\n' if not loop.last }}{% endfor %}<｜tool▁calls▁end｜>",
        "end": "<｜end▁of▁sentence｜>",
        "results": "<｜tool▁outputs▁begin｜>{0}<｜tool▁outputs▁end｜>",
        "result": "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
        "anchor": "<｜Assistant｜>|<｜tool▁outputs▁end｜>",
        "read": {
            "open_pattern": r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
            "close_pattern": r"\n```<｜tool▁call▁end｜>\s*",
            "content": "json",
            "repeats": True,
            "transform": NAMED,
        },
    },
    "gpt_oss": {
        "special": "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> <|call|> "
        "<|endofprompt|>",
        "eos": "<|return|> <|endoftext|> <|call|>",
        "user": "<|start|>user<|message|>{{ m.content }}<|end|>",
        "opening": "<|start|>assistant",
        "call": f" to=functions.{{{{ f.name }}}}<|channel|>commentary json<|message|>{PLAIN}<|call|>",
        "calls_end": "",
        "said": "<|channel|>final<|message|>{{ m.content }}",
        "end": "<|return|>",
        "result": "<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>",
        "read": {
            "open_pattern": r"to=functions\.(?P<name>\S+?)<\|channel\|>commentary\s+json<\|message\|>",
            "close": "<|call|>",
            "content": "json",
            "repeats": True,
            "transform": NAMED,
        },
        "content": {"open": "<|channel|>final<|message|>", "close": "<|return|>"},
    },
    "gemma": {
        "special": "<pad> <eos> <bos> <unk> <mask> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> "
        '<|"|> <|think|> <|channel> <channel|> <|turn> <turn|> <|image> <image|> <|audio> <audio|>',
        "eos": "<eos> <turn|> <|tool_response>",
        "begin": "<bos>",
        "user": "<|turn>user\n{{ m.content }}<turn|>\n",
        "opening": "<|turn>model\n",
        "after": "",
        "call": "<|tool_call>call:{{ f.name }}{ {%- for k, v in f.arguments.items() %}{{ k }}:"
        "{% if v is string %}<|\"|>{{ v }}<|\"|>{% else %}{{ v }}{% endif %}{{ ',' if not loop.last }}{% endfor -%} }<tool_call|>",
        "calls_end": "",
        "end": "<turn|>\n",
        "result": '<|tool_response>response:{{ m.name }}{value:<|"|>{{ m.content }}<|"|>}<tool_response|>',
        "anchor": r"<\|turn>model\n|<tool_response\|>",
        "read": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close_pattern": r"<tool_call\|>\s*",
            "content": "json",
            "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
            "repeats": True,
            "transform": NAMED,
        },
    },
    "glm": {
        "special": "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|> "
        "<|begin_of_image|> <|end_of_image|>",
        "added": "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> "
        "</arg_value>",
        "eos": "<|endoftext|> <|user|> <|observation|>",
        "begin": "[gMASK]<sop>",
        "user": "<|user|>\n{{ m.content }}",
        "opening": "<|assistant|>\n",
        "call": "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}"
        "</arg_value>\n{% endfor %}</tool_call>",
        "end": "",
        "results": "<|observation|>{0}",
        "result": "\n<tool_response>\n{{ m.content }}\n</tool_response>",
        "read": {
            "open_pattern": r"<tool_call>(?P<name>\S+)\n",
            "close_pattern": r"</tool_call>\s*",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*\n<arg_value>(?P<value>.*?)</arg_value>"},
            "repeats": True,
            "transform": NAMED,
        },
    },
    "lfm": {
        **CHATML,
        "special": "<|pad|> <|startoftext|> <|endoftext|> <|im_start|> <|im_end|> <|tool_list_start|> <|tool_list_end|> "
        "<|tool_call_start|> <|tool_call_end|> <|tool_response_start|> <|tool_response_end|>",
        "eos": "<|im_end|> <|endoftext|>",
        "begin": "<|startoftext|>",
        "calls": "<|tool_call_start|>[{% for c in m.tool_calls %}{% set f = c.function %}{{ f.name }}({% for k, v in "
        "f.arguments.items() %}{{ k }}={% if v is string %}'{{ v }}'{% else %}{{ v }}{% endif %}{{ ', ' if not loop.last }}"
        "{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>",
        "result": "<|im_start|>tool\n<|tool_response_start|>{{ m.content }}<|tool_response_end|><|im_end|>\n",
        "read": {
            "open_pattern": r"(?:<\|tool_call_start\|>\[|,\s*)(?P<name>\w+)\(",
            "close_pattern": r"\)(?:\]<\|tool_call_end\|>)?",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"(?P<key>\w+)=(?P<value>'[^']*'|[^,)]*)",
                "value_parser": {"name": "json", "args": {"string_delims": [["'", "'"]], "allow_non_json": True}},
            },
            "repeats": True,
            "transform": NAMED,
        },
    },
}


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
    return (
        f"{of.get('begin', '')}{{% for m in messages %}}{{% if m.role == 'user' %}}{of['user']}{{% elif m.role == 'tool' %}}{result}"
        f"{{% elif m.tool_calls %}}{opened}{calls}{of.get('calls_end', of['end'])}{{% else %}}{opened}{said}{of['end']}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{% if messages[-1].role == 'tool' %}}{then}{{% else %}}{opening}{{% endif %}}"
        "{% endif %}"
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
