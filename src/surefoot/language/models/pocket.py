"""The built-in small model "pocket": a Llama with random weights and a tokenizer of characters."""

import string
from typing import TYPE_CHECKING

import torch

from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError, require_package

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ALPHABET = "".join(character for character in string.printable if character.isprintable()) + "\n"
"""printable ASCII and the line break"""
PAD, EOS, UNK = "⟨pad⟩", "⟨eos⟩", "⟨unk⟩"
ROLES = ("system", "user", "assistant")
SPECIALS = (PAD, EOS, UNK, *(f"⟨{role}⟩" for role in ROLES))
"""not ASCII, so no text of the alphabet can contain one"""
WIDTH, LAYERS, HEADS, FEED_FORWARD, CONTEXT = 128, 4, 4, 352, 1024
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('the roles are system, user, assistant and tool') }}{% endif %}"
    "{{ '⟨' + ('system' if message['role'] == 'tool' else message['role']) + '⟩' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function']['name'] }}({% for name, value in "
    "call['function']['arguments'].items() %}{{ ',' if not loop.first }}{{ name }}={{ value | tojson }}{% endfor %})"
    "{{ '\\n' if not loop.last }}"
    "{% else %}{{ message['content'] }}{% endfor %}"
    "{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '⟨assistant⟩' }}{% endif %}"
)
RESPONSE_TEMPLATE = {
    "start_anchor": "⟨assistant⟩",
    "fields": {
        "content": {"close": EOS},
        "tool_calls": {
            "open_pattern": r"(?P<name>[A-Za-z_]\w*)\(",
            "close_pattern": rf"\)(?=\n|{EOS}|\Z)",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r'(?P<key>\w+)=(?P<value>"(?:[^"\\]|\\.)*"|.*?(?=,\w+=|\Z))',
                "value_parser": {"name": "json", "args": {}},
            },
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
"""calls are written ``name(argument=JSON,…)``, one a line"""


def pocket(alphabet: str = ALPHABET, seed: int = 1) -> "tuple[LlamaForCausalLM, PreTrainedTokenizerFast]":
    """Create a tiny Llama and its tokenizer: one token per character of the alphabet, weights from the seed alone.

    About 0.8 M parameters: width 128, 4 layers, 4 heads, feed-forward 352, context 1024. Text of the alphabet survives
    encoding and decoding; other characters become ⟨unk⟩. Pad, EOS and unk are separate tokens; there is no BOS. Needs the extra
    ``language``.

    Raises SurefootError if the alphabet is empty or repeats a character.
    """
    require_package("transformers", "language", "model='pocket'")
    from transformers import LlamaForCausalLM

    tokenizer = character_tokenizer(alphabet)
    config = pocket_config(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "pocket"))
        model = LlamaForCausalLM(config)
    return model.eval(), tokenizer


def pocket_config(tokenizer: "PreTrainedTokenizerFast | None" = None) -> "LlamaConfig":
    """The model's configuration, for its own tokenizer by default."""
    from transformers import LlamaConfig

    tokenizer = tokenizer or character_tokenizer()
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=FEED_FORWARD,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def character_tokenizer(alphabet: str = ALPHABET, context: int = CONTEXT) -> "PreTrainedTokenizerFast":
    """A tokenizer with one token per character, after the special tokens.

    Raises SurefootError if the alphabet is empty or repeats a character.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if not alphabet or len(set(alphabet)) < len(alphabet):
        raise SurefootError(f"alphabet={alphabet!r}: must have at least one character, and each only once")
    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *alphabet))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        extra_special_tokens=list(SPECIALS[3:]),
        chat_template=TEMPLATE,
        response_template=RESPONSE_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
