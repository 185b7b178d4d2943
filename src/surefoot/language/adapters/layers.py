"""One frozen base that several roles read through, each with an adapter of its own (LoRA, Hu et al. 2021, arXiv 2106.09685).

A layer's W·x becomes W·x + (α/r)·B·A·x, where only A and B are trained. ``peft`` can hold several pairs of A and B beside a
layer, under names, and a switch in every layer says which of them is added. So policy, value model and reward models are one W
with a pair each, and the reference is the same W with none: bit for bit what was read from the disk. A role is *played*: within
``playing(role)`` the switch of every layer stands at that role, and outside at the policy, so that whatever reads the model
(sampler, scorer, learner) means the policy unless it says otherwise.

The switch is a state of the model, and a backward pass that computes layers again (gradient checkpointing) comes when it may
stand at another role than it did in the forward pass: the gradient would be wrong without a word. ``contexts`` therefore
remembers with every checkpointed layer which role it was computed in, and plays it again while that layer is recomputed.

The experts of a mixture are one parameter [experts, out, in], beside which ``peft`` puts a pair for each expert. It does so
by a wrapper around the module that holds them, and one more for each further parameter: base_layer.base_layer.down_proj.
"""

import hashlib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surefoot.core.distributed import rank
from surefoot.core.seeding import derived_seed, stream
from surefoot.errors import SurefootError, cause_of, did_you_mean
from surefoot.language.extras import quiet_transformers, require_package

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from surefoot.recipes.language import AdapterSettings

POLICY, VALUE = "policy", "value"
"""the roles that are trained; one that scores texts is named by its place among the rewards"""
CHECKPOINT_CONTEXTS = "role_contexts"
"""the trunk's attribute by which whoever checkpoints its layers finds ``contexts``"""


class SharedBase:
    """A model whose weights are frozen, and the adapters beside them.

    model    an AutoModelForCausalLM, or a trunk alone; the trunk is changed in place
    seed     adapters start from a stream of their own
    base_hash  of the weights, where it is known; None: it is made here, by reading them all; "" for tensors without contents

    Raises SurefootError where ``peft`` is not installed.
    """

    def __init__(self, model: "PreTrainedModel", seed: int = 1, base_hash: str | None = None) -> None:
        require_package("peft", "adapter", extra="adapters")
        self.hash = weights_hash(model) if base_hash is None else base_hash
        """of the base, by which an adapter knows it again"""
        self.source = ""
        """the folder or hub id that it came from"""
        self.trunk: Any = model.base_model
        self.seed = seed
        self.linear, self.matrices = linear_layers(self.trunk), bare_matrices(self.trunk)
        self.size = sum(parameter.numel() for parameter in model.parameters())
        """parameters of the model"""
        self.configs: dict[str, Any] = {}
        """a LoraConfig by role"""
        self.layers: list[Any] = []
        self.active: str | None = POLICY
        self.noise: DropoutGenerator | None = None
        model.requires_grad_(False)
        setattr(self.trunk, CHECKPOINT_CONTEXTS, self.contexts)

    def add(self, role: str, settings: "AdapterSettings", *, trained: bool = True) -> None:
        """Give a role an adapter that adds nothing yet: B is 0, and A is drawn from the role's own stream.

        Raises SurefootError where ``targets`` names no linear layer or matrix of the trunk, or ``peft`` can't adapt one.
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
            parameter.requires_grad_(trained)
        if settings.dropout and trained:
            self.noise = self.noise or DropoutGenerator(derived_seed(self.seed, "adapter dropout"))
            for layer in self.layers:
                if role in layer.lora_dropout:
                    layer.lora_dropout[role] = Dropout(settings.dropout, self.noise)

    def inject(self, role: str, settings: "AdapterSettings") -> None:
        """Put A and B of a role beside the layers, whatever is in them."""
        self._inject(role, lora_config(settings, *resolve_targets(settings.targets, self.linear, self.matrices)))

    def load(self, role: str, config: Any, tensors: Mapping[str, Tensor]) -> None:
        """Give a role the adapter in these tensors, by the names of ``tensors``; frozen.

        Raises SurefootError where they are not those of such an adapter.
        """
        self._inject(role, config)
        own = {peft_name(name, role): parameter for name, parameter in self.parameters(role)}
        fits = own.keys() == tensors.keys() and all(own[name].shape == tensors[name].shape for name in own)
        if not fits:
            raise SurefootError(f"adapter of the {role}: its tensors are not those of its configuration; copy the whole folder")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(tensors[name])
                parameter.requires_grad_(False)

    def parameters(self, role: str) -> Iterator[tuple[str, nn.Parameter]]:
        """A and B of a role in every layer, with their names in the trunk."""
        for name, parameter in self.trunk.named_parameters():
            if name.endswith((f".lora_A.{role}.weight", f".lora_B.{role}.weight")):
                yield name, parameter

    def tensors(self, role: str) -> dict[str, Tensor]:
        """The same, named without the role."""
        return {peft_name(name, role): parameter.detach() for name, parameter in self.parameters(role)}

    def parts(self, role: str) -> nn.ModuleList:
        """The modules that hold them."""
        pairs = ((layer.lora_A[role], layer.lora_B[role]) for layer in self.layers if role in layer.lora_A)
        return nn.ModuleList([module for pair in pairs for module in pair])

    def using(self, role: str | None) -> "ActiveAdapter":
        """A context in which every layer adds what the role's adapter does; None: in which none adds anything."""
        return ActiveAdapter(self, role)

    def contexts(self) -> tuple[AbstractContextManager[None], "ActiveAdapter"]:
        """What ``torch.utils.checkpoint`` asks for at every checkpoint: a context for the forward pass, and one for computing
        it again.
        """
        return nullcontext(), self.using(self.active)

    def switch(self, role: str | None) -> None:
        """Set every layer's switch."""
        for layer in self.layers:
            layer._active_adapter = [] if role is None else [role]  # peft's own methods change requires_grad besides
        self.active = role

    def summary(self, role: str = POLICY) -> str:
        """What a role's adapter is beside, and what share of the parameters that leaves frozen: one line."""
        names = [
            (base_name(name), getattr(layer, "parameter_name", None))
            for name, layer in self.trunk.named_modules()
            if role in getattr(layer, "lora_A", ())
        ]
        layers = [name for name, parameter in names if parameter is None]
        matrices = [f"{name}.{parameter}" for name, parameter in names if parameter is not None]
        beside = ", ".join([*name_endings(layers), *name_endings(matrices)])
        trained = sum(parameter.numel() for _, parameter in self.parameters(role))
        line = f"adapter: beside {beside} ({len(names)} matrices); {trained:,} parameters are trained, "
        line += f"{self.size / (self.size + trained):.2%} of all are frozen"
        left = name_endings([name for name, count in self.matrices.items() if count == 3 and name not in matrices])
        return line + (f", the experts among them ({', '.join(left)}: name them in adapter.targets)" if left else "")

    def _check_reached(self, role: str, settings: "AdapterSettings") -> None:
        """Raise SurefootError where an adapter of experts would do nothing, as the model reads them past their module, or has a
        dropout, which ``peft`` can't give it.
        """
        wrappers = {name: x for name, x in self.trunk.named_modules() if hasattr(x, "parameter_name") and role in x.lora_A}
        if not wrappers:
            return
        if settings.dropout:
            ends = ", ".join(name_endings([f"{base_name(name)}.{x.parameter_name}" for name, x in wrappers.items()]))
            raise SurefootError(f"adapter.dropout={settings.dropout}: experts ({ends}) can't have one; set 0")
        read: set[str] = set()
        hooks = [x.register_forward_pre_hook(lambda *_, name=name: read.add(name)) for name, x in wrappers.items()]
        try:
            with torch.no_grad(), quiet_transformers():
                self.trunk(input_ids=torch.zeros(1, 4, dtype=torch.long, device=next(self.trunk.parameters()).device))
        finally:
            for hook in hooks:
                hook.remove()
        for name, wrapper in wrappers.items():
            if name not in read:
                target = f"{base_name(name)}.{wrapper.parameter_name}"
                raise SurefootError(
                    f"adapter.targets={target!r}: {type(self.trunk).__name__} reads it past its module, so that an adapter "
                    "there does nothing; leave it out"
                )

    def _check_same_experts(self, role: str, config: Any) -> None:
        """Raise SurefootError for other experts than another role's: ``peft`` knows a pair by the place of its wrapper."""
        mine = sorted(config.target_parameters or ())
        for other, known in self.configs.items():
            theirs = sorted(known.target_parameters or ())
            if mine and theirs and mine != theirs:
                raise SurefootError(
                    f"adapter of the {role}: is beside {', '.join(mine)}, and that of the {other} beside {', '.join(theirs)}; "
                    "roles on one base must name the same experts in adapter.targets, or none"
                )

    def _inject(self, role: str, config: Any) -> None:
        from peft import inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._check_same_experts(role, config)
        wanted = {p for p in self.trunk.parameters() if p.requires_grad}
        # its own start is drawn, and then overwritten; without contents nothing is drawn, nor can a generator's state be read
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]) if self.hash else modules_stay():
            warnings.simplefilter("ignore")
            try:
                inject_adapter_in_model(config, self.trunk, role)
            except ValueError as error:
                raise SurefootError(f"adapter: peft can't adapt this model ({cause_of(error)}); set adapter.targets") from None
        for leftover in ("peft_config", "active_adapter"):  # that there is one already would be warned of at the next
            if leftover in vars(self.trunk):
                delattr(self.trunk, leftover)
        for parameter in self.trunk.parameters():
            parameter.requires_grad_(parameter in wanted)
        self.configs[role] = config
        self.layers = [module for module in self.trunk.modules() if isinstance(module, BaseTunerLayer)]
        self.switch(self.active)


class ActiveAdapter:
    """A context that may be entered more than once: a recomputation may happen twice."""

    def __init__(self, base: SharedBase, role: str | None) -> None:
        self.base, self.role = base, role
        self._before: list[str | None] = []

    def __enter__(self) -> None:
        self._before.append(self.base.active)
        self.base.switch(self.role)

    def __exit__(self, *_: object) -> None:
        self.base.switch(self._before.pop())


class RoleTrunk(nn.Module):
    """The shared trunk as one role reads it; its parameters are those of that role's adapter alone."""

    def __init__(self, base: SharedBase, role: str) -> None:
        super().__init__()
        self.base, self.role, self.config = base, role, base.trunk.config
        self.parts = base.parts(role)

    @property
    def reader(self) -> Any:
        """Who reads."""
        return self.base.trunk

    def forward(self, **given: Any) -> Any:
        """What the trunk returns in this role."""
        with self.base.using(self.role):
            return self.reader(**given)


class DropoutGenerator:
    """A stream of random numbers on the device of whoever asks, that begins anew with every batch.

    Where it begins is derived from the run's seed, the batch and the rank. So there is nothing to save: one checkpoint is
    enough for all ranks, though each draws as many numbers as its own rows need.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.start_batch(0, 0)

    def start_batch(self, iteration: int, faults: int) -> None:
        """The next batch: after so many iterations, and so many updates in a row that were not taken."""
        self._now = derived_seed(self.seed, "batch", iteration, faults, rank())
        self._generator: torch.Generator | None = None

    def generator(self, device: torch.device) -> torch.Generator:
        """The generator; always asked for on one device."""
        if self._generator is None:
            self._generator = torch.Generator(device).manual_seed(self._now)
        return self._generator


class Dropout(nn.Module):
    """Dropout wherever a graph is made: policies stay in evaluation mode, and what is only judged has none."""

    def __init__(self, rate: float, noise: DropoutGenerator) -> None:
        super().__init__()
        self.rate, self.noise = rate, noise

    def forward(self, x: Tensor) -> Tensor:
        """Inputs of which some are 0, and the others larger."""
        if not torch.is_grad_enabled():
            return x
        kept = torch.rand(x.shape, generator=self.noise.generator(x.device), device=x.device) >= self.rate
        return x * kept / (1 - self.rate)


def weights_hash(module: nn.Module) -> str:
    """A hash of every weight by name."""
    found = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:32]


# ---- which layers -------------------------------------------------------------------------------------------------------


def linear_layers(trunk: nn.Module) -> list[str]:
    """Names of a trunk's linear layers, those of ``transformers`` that store theirs transposed included."""
    from transformers.pytorch_utils import Conv1D

    return [name for name, module in trunk.named_modules() if isinstance(module, (nn.Linear, Conv1D))]


def bare_matrices(trunk: nn.Module) -> dict[str, int]:
    """Names of the matrices that a trunk multiplies with and that are no layer of their own, and how many dimensions they have:
    3 for those of all experts in one, 2 for a router.
    """
    layers = {f"{name}.weight" for name in linear_layers(trunk)}
    layers |= {f"{name}.weight" for name, module in trunk.named_modules() if isinstance(module, nn.Embedding)}
    named = ((name, p) for name, p in trunk.named_parameters() if name not in layers and not name.endswith("bias"))
    return {name: p.dim() for name, p in named if p.dim() in (2, 3)}


def name_endings(names: Iterable[str]) -> list[str]:
    """The last words of names, as ``targets`` may have them; of a number or ``weight`` with what it belongs to."""
    found = set()
    for name in names:
        above, _, last = name.rpartition(".")
        found.add(name if last.isdigit() else f"{above.rpartition('.')[2]}.weight" if last == "weight" else last)
    return sorted(found)


def resolve_targets(
    targets: str | tuple[str, ...], linear: list[str], matrices: Iterable[str] = ()
) -> tuple[list[str], list[str]]:
    """Ends of names, as ``peft`` takes them: those that mean linear layers; and of the others those that mean bare matrices.

    Raises SurefootError for one that means neither.
    """
    if isinstance(targets, str):
        return name_endings(linear), []
    layers = [target for target in targets if any(f".{name}".endswith(f".{target}") for name in linear)]
    others = [target for target in targets if target not in layers]
    for target in others:
        if not any(f".{name}".endswith(f".{target}") for name in matrices):
            ends = [*name_endings(linear), *name_endings(matrices)]
            known = did_you_mean(target, ends) or f"; it has: {', '.join(ends)}"
            raise SurefootError(f"adapter.targets={target!r}: the model's trunk has no linear layer of that name{known}")
    return layers, others


def lora_config(settings: "AdapterSettings", layers: list[str], matrices: list[str]) -> Any:
    """The settings as ``peft`` has them."""
    from peft import LoraConfig

    alpha = int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha
    fused = {"target_parameters": matrices} if matrices else {}
    options: dict[str, Any] = {"lora_dropout": 0.0, "bias": "none", **fused}
    return LoraConfig(r=settings.rank, lora_alpha=alpha, target_modules=layers, **options)  # type: ignore[arg-type]


def peft_name(name: str, role: str) -> str:
    """A tensor's name without the role: as in the files of ``peft``."""
    return name.removesuffix(f".{role}.weight") + ".weight"


def base_name(name: str) -> str:
    """The name that a module or tensor has without adapters around it."""
    return re.sub(r"(\.base_layer)+(?=\.|$)", "", name)


def adapted_name(layer: Any) -> str:
    """Which of its base layer's parameters an adapter is beside."""
    return str(getattr(layer, "parameter_name", "weight"))


@contextmanager
def modules_stay() -> Iterator[None]:
    """Within, modules stay where they are made: ``peft`` moves its own to their layer's device, even if they are there, and
    those of tensors without contents can't be moved.
    """
    name, move = "to", nn.Module.to
    setattr(nn.Module, name, lambda module, *_, **__: module)
    try:
        yield
    finally:
        setattr(nn.Module, name, move)


# ---- as one model -------------------------------------------------------------------------------------------------------


def has_adapters(module: nn.Module) -> bool:
    """Whether any layer has an adapter beside it."""
    return any(hasattr(part, "lora_A") for part in module.modules())


@torch.no_grad()
def merged_state(model: nn.Module, role: str = POLICY) -> dict[str, Tensor] | None:
    """The weights of a model with those of a role's adapter added, by the names they have without; None for one without
    adapters.
    """
    if not has_adapters(model):
        return None
    found = {base_name(name): tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    for name, layer in model.named_modules():
        if role in getattr(layer, "lora_A", ()):
            adapted = f"{base_name(name)}.{adapted_name(layer)}"
            found[adapted] = found[adapted] + layer.get_delta_weight(role)
    return found


@torch.no_grad()
def merge(trunk: nn.Module, role: str = POLICY) -> None:
    """Add a role's adapter to the weights for good, and leave plain layers."""
    for name, layer in list(trunk.named_modules()):
        if hasattr(layer, "lora_A"):
            plain: Any = layer.get_base_layer()
            if role in layer.lora_A:
                getattr(plain, adapted_name(layer)).add_(layer.get_delta_weight(role))
            if name == base_name(name):  # not one inside another, which goes with it
                parent, _, own = name.rpartition(".")
                setattr(trunk.get_submodule(parent), own, plain)
    if hasattr(trunk, CHECKPOINT_CONTEXTS):
        delattr(trunk, CHECKPOINT_CONTEXTS)
    trunk.requires_grad_(True)
