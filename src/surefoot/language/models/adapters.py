"""One frozen base shared by several roles, each with its own LoRA adapter (Hu et al. 2021, arXiv 2106.09685).

A layer's W·x becomes W·x + (α/r)·B·A·x, and only A and B are trained. ``peft`` stores several named pairs of A and B for a
layer, and each layer has a switch for the active one. Policy, value model and reward models are one W with a pair each; the
reference is W without a pair, bit for bit what was loaded. Within ``using(role)`` every layer uses that role's adapter, and
outside the policy's, so sampler, scorer and learner use the policy by default.

Gradient checkpointing recomputes layers in the backward pass, when another role may be active; the gradient would be silently
wrong. So ``contexts`` stores the role of every checkpointed layer's forward pass, and activates it again for the recomputation.

The experts of a mixture are one parameter [experts, out, in], for which ``peft`` adds a pair per expert. It wraps the module
that contains the parameter, once for each parameter: base_layer.base_layer.down_proj.
"""

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surefoot.core.seeding import derived_seed, stream
from surefoot.errors import SurefootError, cause_of, require_package
from surefoot.language import quiet_transformers
from surefoot.language.models.adapter_targets import (
    bare_matrices,
    linear_layers,
    loaded_config,
    lora_config,
    matrix_endings,
    name_endings,
    renamed_by_peft,
    resolve_targets,
)
from surefoot.language.models.quantised import parameter_count, prepare_bitsandbytes, restore, restored_state, shown_to_peft
from surefoot.ranks.collectives import rank

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from surefoot.recipes.models import AdapterSettings

POLICY, VALUE = "policy", "value"
"""the trained roles; reward models are named by their index among the rewards"""
CHECKPOINT_CONTEXTS = "role_contexts"
"""the trunk's attribute that holds ``contexts`` for gradient checkpointing"""


class SharedBase:
    """A model with frozen weights, and its adapters.

    model    an AutoModelForCausalLM, or a trunk alone; the trunk is changed in place
    seed     of the adapters' initial weights
    base_hash  of the weights, if known; None: computed here from all weights; "" for tensors without data

    Raises SurefootError if ``peft`` is not installed.
    """

    def __init__(self, model: "PreTrainedModel", seed: int = 1, base_hash: str | None = None) -> None:
        require_package("peft", "adapters", "adapter")
        prepare_bitsandbytes()
        self.hash = weights_hash(model) if base_hash is None else base_hash
        """of the base weights; an adapter stores it"""
        self.source = ""
        """the folder or hub id of the base"""
        self.trunk: Any = model.base_model
        self.seed = seed
        self.linear, self.matrices = linear_layers(self.trunk), bare_matrices(self.trunk)
        self.size = parameter_count(model)
        """parameters of the model"""
        self.configs: dict[str, Any] = {}
        """a LoraConfig by role"""
        self.layers: list[Any] = []
        self.active: str | None = POLICY
        self.noise: DropoutGenerator | None = None
        model.requires_grad_(False)
        setattr(self.trunk, CHECKPOINT_CONTEXTS, self.contexts)

    def add(self, role: str, settings: "AdapterSettings") -> None:
        """Add an adapter for a role, which changes nothing yet: B is 0, and A is drawn from the role's own stream.

        Raises SurefootError if ``targets`` matches no linear layer or matrix of the trunk, or if ``peft`` can't adapt one.
        """
        self.inject(role, settings)
        self._check_reached(role, settings)
        for name, parameter in self.parameters(role):
            with torch.no_grad():
                if ".lora_A." in name:
                    bound = parameter.shape[1] ** -0.5
                    parameter.uniform_(-bound, bound, generator=stream(self.seed, f"adapter {role} {name}"))
                else:
                    parameter.zero_()
            parameter.requires_grad_(True)
        if settings.dropout:
            self.noise = self.noise or DropoutGenerator(derived_seed(self.seed, "adapter dropout"))
            for layer in self.layers:
                if role in layer.lora_dropout:
                    layer.lora_dropout[role] = Dropout(settings.dropout, self.noise)

    def inject(self, role: str, settings: "AdapterSettings") -> None:
        """Add A and B of a role to the layers, uninitialised."""
        config = lora_config(settings, *resolve_targets(settings.targets, self.linear, self.matrices))
        self._inject(role, config)

    def load(self, role: str, config: Any, tensors: Mapping[str, Tensor]) -> None:
        """Add a frozen adapter for a role from saved tensors, named as in ``tensors``.

        Raises SurefootError if they don't fit the configuration.
        """
        self._inject(role, loaded_config(config, self.linear))
        own = {peft_name(name, role): parameter for name, parameter in self.parameters(role)}
        fits = own.keys() == tensors.keys() and all(own[name].shape == tensors[name].shape for name in own)
        if not fits:
            raise SurefootError(f"adapter of the {role}: its tensors don't fit its configuration; copy the whole folder")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(tensors[name])
                parameter.requires_grad_(False)

    def parameters(self, role: str) -> Iterator[tuple[str, nn.Parameter]]:
        """A and B of a role in every layer, by their names in the trunk."""
        for name, parameter in self.trunk.named_parameters():
            if name.endswith((f".lora_A.{role}.weight", f".lora_B.{role}.weight")):
                yield name, parameter

    def tensors(self, role: str) -> dict[str, Tensor]:
        """A and B of a role, named without the role."""
        return {peft_name(name, role): parameter.detach() for name, parameter in self.parameters(role)}

    def parts(self, role: str) -> nn.ModuleList:
        """The modules of a role's A and B."""
        pairs = ((layer.lora_A[role], layer.lora_B[role]) for layer in self.layers if role in layer.lora_A)
        return nn.ModuleList([module for pair in pairs for module in pair])

    def using(self, role: str | None) -> "ActiveAdapter":
        """A context in which every layer uses the role's adapter; None: no adapter."""
        return ActiveAdapter(self, role)

    def contexts(self) -> tuple[AbstractContextManager[None], "ActiveAdapter"]:
        """Contexts for ``torch.utils.checkpoint``: of the forward pass, and of its recomputation with the same role."""
        return nullcontext(), self.using(self.active)

    def switch(self, role: str | None) -> None:
        """Activate a role's adapter in every layer; None: no adapter."""
        for layer in self.layers:
            layer._active_adapter = [] if role is None else [role]  # peft's own methods also change requires_grad
        self.active = role

    def summary(self, role: str = POLICY) -> str:
        """One line: the layers and experts that a role's adapter adapts, with ranks, and the share of frozen parameters."""
        counts: dict[tuple[int, int], Counter[str]] = {}
        matrices = set()
        for name, layer in self.trunk.named_modules():
            if role in getattr(layer, "lora_A", ()):
                own, ending = base_name(name), name_endings([name])[0]
                if hasattr(layer, "parameter_name"):
                    matrices.add(f"{own}.{layer.parameter_name}")
                    ending = matrix_endings([f"{own}.{layer.parameter_name}"])[0]
                counts.setdefault((getattr(layer, "num_experts", 1), layer.r[role]), Counter())[ending] += 1
        trained = sum(parameter.numel() for _, parameter in self.parameters(role))
        line = f"adapter: {'; '.join(rank_summary(*key, counts[key]) for key in sorted(counts))}; {trained:,} parameters are "
        line += f"trained, {self.size / (self.size + trained):.2%} of all are frozen"
        frozen = matrix_endings([name for name, count in self.matrices.items() if count == 3 and name not in matrices])
        return line + (f", including the experts ({', '.join(frozen)}: name them in adapter.targets)" if frozen else "")

    def _check_reached(self, role: str, settings: "AdapterSettings") -> None:
        """Raise SurefootError if an adapter of experts would have no effect because the model bypasses their module, or if it
        has a dropout, which ``peft`` does not support there.
        """
        wrappers = {name: x for name, x in self.trunk.named_modules() if hasattr(x, "parameter_name") and role in x.lora_A}
        if not wrappers:
            return
        if settings.dropout:
            ends = ", ".join(matrix_endings([f"{base_name(name)}.{x.parameter_name}" for name, x in wrappers.items()]))
            raise SurefootError(f"adapter.dropout={settings.dropout}: experts ({ends}) don't support dropout; set 0")
        used: set[str] = set()
        hooks = [x.register_forward_pre_hook(lambda *_, name=name: used.add(name)) for name, x in wrappers.items()]
        try:
            with torch.no_grad(), quiet_transformers():
                self.trunk(input_ids=torch.zeros(1, 4, dtype=torch.long, device=next(self.trunk.parameters()).device))
        finally:
            for hook in hooks:
                hook.remove()
        for name, wrapper in wrappers.items():
            if name not in used:
                target = f"{base_name(name)}.{wrapper.parameter_name}"
                raise SurefootError(
                    f"adapter.targets={target!r}: {type(self.trunk).__name__} bypasses its module, so an adapter there "
                    "has no effect; leave it out"
                )

    def _check_same_experts(self, role: str, config: Any) -> None:
        """Raise SurefootError if another role adapts other experts: ``peft`` identifies a pair by the depth of its wrapper."""
        mine = sorted(config.target_parameters or ())
        for other, other_config in self.configs.items():
            theirs = sorted(other_config.target_parameters or ())
            if mine and theirs and mine != theirs:
                raise SurefootError(
                    f"adapter of the {role}: adapts {', '.join(mine)}, but that of the {other} adapts {', '.join(theirs)}; "
                    "name the same experts in adapter.targets for all roles of a base, or none"
                )

    def _inject(self, role: str, config: Any) -> None:
        from peft import inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._check_same_experts(role, config)
        trained = {p for p in self.trunk.parameters() if p.requires_grad}
        # peft replaces names only in a module with a model's config, so a container without one prevents it.
        rename = not renamed_by_peft(config, self.trunk)
        model = self.trunk if rename else nn.ModuleDict({"trunk": self.trunk})
        # peft draws initial weights, which are then overwritten
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), shown_to_peft(model):
            warnings.simplefilter("ignore")
            try:
                inject_adapter_in_model(config, model, role, low_cpu_mem_usage=not self.hash)
            except ValueError as error:
                raise SurefootError(f"adapter: peft can't adapt this model ({cause_of(error)}); set adapter.targets") from None
        for leftover in ("peft_config", "active_adapter"):  # the next adapter would warn of an existing one
            if leftover in vars(self.trunk):
                delattr(self.trunk, leftover)
        for parameter in self.trunk.parameters():
            parameter.requires_grad_(parameter in trained)
        for _, parameter in self.parameters(role):
            if parameter.dtype in (torch.bfloat16, torch.float16):  # peft takes the dtype of the base
                parameter.data = parameter.data.float()
        self.configs[role] = config
        self.layers = [module for module in self.trunk.modules() if isinstance(module, BaseTunerLayer)]
        self.switch(self.active)


class ActiveAdapter:
    """A reentrant context: a layer may be recomputed more than once."""

    def __init__(self, base: SharedBase, role: str | None) -> None:
        self.base, self.role = base, role
        self._before: list[str | None] = []

    def __enter__(self) -> None:
        self._before.append(self.base.active)
        self.base.switch(self.role)

    def __exit__(self, *_: object) -> None:
        self.base.switch(self._before.pop())


class RoleTrunk(nn.Module):
    """The shared trunk of one role; its parameters are those of the role's adapter."""

    def __init__(self, base: SharedBase, role: str) -> None:
        super().__init__()
        self.base, self.role, self.config = base, role, base.trunk.config
        self.parts = base.parts(role)

    @property
    def reader(self) -> Any:
        """The trunk without the role; its signature is the one to inspect."""
        return self.base.trunk

    def forward(self, **inputs: Any) -> Any:
        """The trunk's output with this role's adapter."""
        with self.base.using(self.role):
            return self.reader(**inputs)


class DropoutGenerator:
    """A random generator for dropout, seeded again for every batch.

    The seed is derived from the run's seed, the batch and the rank. So there is no state to save, and one checkpoint serves all
    ranks, though each draws as many numbers as its own rows need.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.start_batch(0, 0)

    def start_batch(self, iteration: int, faults: int) -> None:
        """Seed the generator for the next batch, by the iteration and the number of consecutive skipped updates."""
        self._seed = derived_seed(self.seed, "batch", iteration, faults, rank())
        self._generator: torch.Generator | None = None

    def replace_generator(self, generator: torch.Generator | None) -> torch.Generator | None:
        """Draw from another generator from now on; None: from a new one. Returns the one before."""
        before, self._generator = self._generator, generator
        return before

    def generator(self, device: torch.device) -> torch.Generator:
        """The generator; always on the same device."""
        if self._generator is None:
            self._generator = torch.Generator(device).manual_seed(self._seed)
        return self._generator


class Dropout(nn.Module):
    """Dropout when gradients are on: policies stay in eval mode, and evaluation has no dropout."""

    def __init__(self, rate: float, noise: DropoutGenerator) -> None:
        super().__init__()
        self.rate, self.noise = rate, noise

    def forward(self, x: Tensor) -> Tensor:
        """Inputs with dropout: some become 0, the others are scaled up."""
        if not torch.is_grad_enabled():
            return x
        kept = torch.rand(x.shape, generator=self.noise.generator(x.device), device=x.device) >= self.rate
        return x * kept / (1 - self.rate)


def base_hash(model: nn.Module, quantize: str | None) -> str:
    """The hash of a base that is not quantised yet; quantised in another way, it is another base."""
    return weights_hash(model) if quantize is None else f"{quantize} {weights_hash(model)}"


def is_print_of(print_of_base: str, quantize: str | None) -> bool:
    """Whether the hash is that of a base quantised so."""
    return print_of_base.partition(" ")[0] == quantize if quantize is not None else " " not in print_of_base


def weights_hash(module: nn.Module) -> str:
    """SHA-256 of all weights, in float32, and their names, shortened."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        tensor = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


# ---- names ------------------------------------------------------------------------------------------------------------


def rank_summary(experts: int, rank: int, counts: Mapping[str, int]) -> str:
    """The layers with adapters of a rank, such as "rank 8 on q_proj, v_proj (24 layers each), down_proj (1 layer)"."""
    parts = []
    for count in sorted(set(counts.values()), reverse=True):
        names = sorted(name for name, number in counts.items() if number == count)
        each = " each" if len(names) > 1 else ""
        parts.append(f"{', '.join(names)} ({count} layer{'s' if count > 1 else ''}{each})")
    return f"rank {rank}{f' for each of {experts} experts' if experts > 1 else ''} on {', '.join(parts)}"


def peft_name(name: str, role: str) -> str:
    """A tensor's name without the role, as in files of ``peft``."""
    return name.removesuffix(f".{role}.weight") + ".weight"


def base_name(name: str) -> str:
    """The name of a module or tensor without adapters."""
    return re.sub(r"(\.base_layer)+(?=\.|$)", "", name)


def adapted_name(layer: Any) -> str:
    """The parameter of its base layer that an adapter adapts."""
    return str(getattr(layer, "parameter_name", "weight"))


# ---- as one model -------------------------------------------------------------------------------------------------------


def has_adapters(module: nn.Module) -> bool:
    """Whether any layer has an adapter."""
    return any(hasattr(part, "lora_A") for part in module.modules())


@torch.no_grad()
def merged_state(model: nn.Module) -> dict[str, Tensor] | None:
    """A model's weights with the policy's adapter merged, by their names without adapters; None if it has none."""
    if not has_adapters(model):
        return None
    merged = {base_name(name): tensor for name, tensor in restored_state(model).items() if ".lora_" not in name}
    for name, layer in model.named_modules():
        if POLICY in getattr(layer, "lora_A", ()):
            adapted = f"{base_name(name)}.{adapted_name(layer)}"
            delta = layer.get_delta_weight(POLICY).to(merged[adapted].device)
            merged[adapted] = (merged[adapted] + delta).to(merged[adapted].dtype)
    return merged


@torch.no_grad()
def merge(trunk: nn.Module) -> None:
    """Merge the policy's adapter into the weights permanently, and restore plain layers."""
    restore(trunk)
    for name, layer in list(trunk.named_modules()):
        if hasattr(layer, "lora_A"):
            plain: Any = layer.get_base_layer()
            if POLICY in layer.lora_A:
                getattr(plain, adapted_name(layer)).add_(layer.get_delta_weight(POLICY))
            if name == base_name(name):  # not a nested wrapper, which is removed with the outer one
                parent, _, own = name.rpartition(".")
                setattr(trunk.get_submodule(parent), own, plain)
    if hasattr(trunk, CHECKPOINT_CONTEXTS):
        delattr(trunk, CHECKPOINT_CONTEXTS)
    trunk.requires_grad_(True)
