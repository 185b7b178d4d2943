"""The rules between the fields of a recipe: what each field is for, in one table, and what can't be combined.

Bounds of a single field are with the field. The rules of a kind yield fields, each with what is wrong and the remedy.
"""

from collections.abc import Callable
from typing import Any

from surefoot.core.algorithms import MAX_LENGTH, Objective
from surefoot.errors import SurefootError
from surefoot.recipes.base import Recipe, nearest_divisor
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.faults import SET, Faults, FieldsFor, misplaced, named_value, value_of
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.models import ModelRecipe
from surefoot.recipes.rewards import term_error, token_error
from surefoot.recipes.supervised import SupervisedRecipe

TEXT = ("sft", "reward", "dpo", "language")
FIELDS_FOR: FieldsFor = (
    ("objective.kl_estimator", "kind", ("control",)),
    ("objective.ratio", "kind", ("language",)),
    ("objective.aggregation", "kind", TEXT),
    ("objective.reference_coefficient", "kind", ("language",)),
    ("objective.importance_cap", "kind", ("language",)),
    ("objective.router_coefficient", "kind", ("sft", "language")),
    ("optimizer.micro_batch_tokens", "kind", TEXT),
    ("adapter.dropout", "kind", ("sft", "reward", "dpo")),  # online, the trained policy would not be the one that samples
    ("optimizer.critic_learning_rate", "objective.baseline", ("critic",)),
    ("network.critic_parts", "objective.baseline", ("critic",)),
    ("optimizer.critic_learning_rate", "network.shared_trunk", (False,)),
    ("rollout.symmetry", "network.lstm", (None,)),  # the state of an LSTM has no mirror image
    ("rollout.workers", "rollout.backend", ("workers",)),
    ("preferences.errors", "preferences.judge", ("return",)),
    ("adapter.dropout", "gradient_checkpointing", (False,)),  # it would draw another dropout
    ("adapter.quantize", "sharding", (None,)),  # weights in 4 or 8 bits are whole on every rank
    ("reshard_after_forward", "sharding", ("full", "hybrid")),
    ("preference.label_smoothing", "preference.loss", ("dpo", "ipo")),
    ("preference.margin", "preference.loss", ("simpo",)),
    ("preference.desirable_weight", "preference.loss", ("kto",)),
    ("preference.undesirable_weight", "preference.loss", ("kto",)),
    ("preference.separator", "preference.loss", ("steps",)),
    ("reference.model", "preference.loss", ("dpo", "ipo", "kto")),
    ("demonstrations", "preference.loss", ("bradley_terry", "binary")),
    ("head", "preference.loss", ("bradley_terry", "binary")),
    ("server", "sampling.engine", ("auto", "vllm")),
    ("sampling.ahead", "sampling.engine", ("auto", "vllm")),
    ("sampling.ahead", "turns.environment", (None,)),
    ("sampling.ahead", "turns.tools", ((),)),
    ("sampling.ahead", "sampling.rounds", (1,)),
    ("sampling.ahead", "sampling.old_log_probs", ("trainer",)),
    ("sampling.rounds", "objective.baseline", ("group", "leave_one_out", "pair")),
    ("objective.importance_cap", "sampling.old_log_probs", ("auto", "trainer", "update")),  # it corrects from the sampler's
    ("reward.missing_eos_value", "reward.missing_eos", ("penalty", "subtract", "bootstrap")),
    ("critic.own_model", "objective.baseline", ("critic",)),
    ("critic.start", "critic.own_model", (True,)),
    ("critic.label", "critic.start", (SET,)),
)
"""what each field is for: a field, another, and the values of that one with which the first may differ from its default"""


def check_rules(recipe: Recipe) -> None:
    """Raise SurefootError, one line, for the first rule that a recipe breaks."""
    rules: tuple[tuple[type[Recipe], Callable[[Any], Faults]], ...] = (
        (ControlRecipe, _control),
        (Recipe, lambda recipe: misplaced(recipe, FIELDS_FOR)),
        (ModelRecipe, _text),
        (SupervisedRecipe, _rows),
        (LanguageRecipe, _online),
    )
    for kind, faults in rules:
        for field, why in faults(recipe) if isinstance(recipe, kind) else ():
            raise SurefootError(f"{named_value(recipe, field)}: {why}")
    if recipe.engine == "compiled" and (obstacle := recipe.compiled_obstacle()):
        raise SurefootError(obstacle)


def _too_large(total: int, unit: str, other: str, times: int) -> str:
    return f"an iteration of {total:,} {unit} (x {other}={times}) is more than {MAX_LENGTH:,}; lower one of them"


def _control(recipe: ControlRecipe) -> Faults:
    rollout, network, minibatches = recipe.rollout, recipe.network, recipe.minibatches
    whole, size = recipe.objective.needs_whole_episodes, recipe.batch_size
    if size > MAX_LENGTH:
        yield "rollout.environments", _too_large(size, "steps", "rollout.steps", rollout.steps)
    if network.lstm and rollout.environments % minibatches:
        why = "an LSTM learns from whole sequences, one per environment, and this does not divide rollout.environments="
        why += f"{rollout.environments}; choose a divisor, such as {nearest_divisor(rollout.environments, minibatches)}"
        yield "objective.reuse.minibatches", why
    if not whole and size % minibatches:
        why = f"does not divide the batch of {size} steps (rollout.environments={rollout.environments} x rollout.steps="
        why += f"{rollout.steps}); choose a divisor, such as {nearest_divisor(size, minibatches)}"
        yield "objective.reuse.minibatches", why
    over = recipe.objective.normalise_advantages
    in_parts = over == "minibatch" and recipe.objective.constraint is None  # under a constraint, parts are the critic's
    if over and not whole and recipe.learned_steps // (minibatches if in_parts else 1) == 1:
        fewer = "set fewer objective.reuse.minibatches" if recipe.learned_steps > 1 else "collect more steps"
        what = "minibatches" if in_parts else "batches"
        why = f"normalises {what} of one step, whose advantage is then always 0; {fewer}, or set it to 'none'"
        yield "objective.normalise_advantages", why
    if recipe.cloning is not None:
        yield from _cloning(recipe)
    if recipe.preferences is not None and rollout.backend in ("native", "envpool"):
        yield "rollout.backend", "has no single environments, whose episodes preferences compare; set 'loop' or 'workers'"
    if recipe.preferences is not None and recipe.preferences.judge == "people" and recipe.evaluation.patience is not None:
        yield "evaluation.patience", "waits for a better return, and people say what is better here; set 'none'"
    if (rollout.workers or 0) > rollout.environments:
        yield "rollout.workers", f"more processes than rollout.environments={rollout.environments}; set at most that many"
    if rollout.backend in ("native", "envpool") and whole:
        why = f"can't collect whole episodes, and {recipe.algorithm} needs them; set 'workers' or 'loop', or an objective "
        yield "rollout.backend", f"{why}with a critic"
    if recipe.objective.compares_in_groups:
        why = "compares responses to the same prompt, which only kind = 'language' has; set 'critic' or 'mean'"
        yield "objective.baseline", why
    if network.shared_trunk and recipe.objective.constraint is not None and recipe.has_critic:
        why = f"under a KL constraint ({recipe.algorithm}) the critic is fitted separately from the policy and can't share its "
        yield "network.shared_trunk", f"{why}trunk; set network.shared_trunk = false"
    if network.shared_trunk and network.actor_parts != network.critic_parts:
        parts = list(network.actor_parts or network.critic_parts or ())
        why = f"actor and critic read the same parts then; set actor_parts = critic_parts = {parts}, or unset it"
        yield "network.shared_trunk", why


def _cloning(recipe: ControlRecipe) -> Faults:
    objective = recipe.objective
    if objective.baseline or objective.reuse or objective.trust_region or objective.normalise_advantages:
        yield "algorithm", "cloning is maximum likelihood, and has no advantages; set algorithm = 'REINFORCE'"
    if recipe.network.lstm is not None:
        yield "network.lstm", "cloning learns from single rows, which an LSTM can't read in order; unset it"
    if recipe.preferences is not None or recipe.rollout.symmetry is not None:
        yield "cloning.data", "rows have neither rewards nor mirror images; unset preferences and rollout.symmetry"


def _text(recipe: ModelRecipe) -> Faults:
    adapter, sharding, columns = recipe.adapter, recipe.sharding, value_of(recipe, "data.columns")
    for own, name in columns.items():
        if list(columns.values()).count(name) > 1:
            yield "data.columns", f"reads several columns as {name!r}; choose one"
        if not own or not name:
            yield "data.columns", "has an empty name; name both columns"
    if recipe.offload is True and sharding is None:
        yield "offload", "is for sharded models; set sharding = 'full', or name models, such as ['reference']"
    if recipe.idle_roles and recipe.kind != "language":
        yield "offload", f"names models of online runs, and kind = {recipe.kind!r} has none of them while it trains; unset it"
    if recipe.objective.constraint is not None:
        yield "algorithm", "natural steps are for control; use PPO_CLIP or PPO_PENALTY"
    if recipe.optimizer.kind == "adam-8bit" and sharding is not None:
        why = f"blocks of moments are whole on every rank, and sharding={sharding!r}; set kind = 'adam', or unset sharding"
        yield "optimizer.kind", why
    if adapter is not None and recipe.model == "pocket":
        why = "model='pocket' has random weights, which adapters would keep frozen; first train it with kind = 'sft' and no "
        yield "adapter", f"{why}adapter, then name that run"


def _rows(recipe: SupervisedRecipe) -> Faults:
    free = {name: getattr(recipe.objective, name) for name in ("aggregation", "aggregation_length", "router_coefficient")}
    if recipe.objective != Objective(gamma=0.0, **free):
        why = f"kind = {recipe.kind!r} gives every row a reward of 1 (REINFORCE with gamma = 0); set only its aggregation, and "
        yield "objective", f"{why}router_coefficient in SFT"
    if recipe.kind == "dpo" and recipe.objective.aggregation != "sequence-sum":
        yield "objective.aggregation", "a pair's loss is the sum over its two labels; unset it"


def _online(recipe: LanguageRecipe) -> Faults:
    sampling, objective, reference, responses = recipe.sampling, recipe.objective, recipe.reference, recipe.responses
    if responses > MAX_LENGTH:
        yield "sampling.prompts", _too_large(responses, "responses", "sampling.samples", sampling.samples)
    if responses % recipe.minibatches:
        why = f"does not divide the {responses} responses of an iteration (sampling.prompts={sampling.prompts} x sampling."
        why += f"samples={sampling.samples}); choose a divisor, such as {nearest_divisor(responses, recipe.minibatches)}"
        yield "objective.reuse.minibatches", why
    yield from _sampler(recipe)
    if objective.compares_in_groups and objective.gamma != 1:
        yield "objective.gamma", f"{objective.baseline!r} compares the undiscounted rewards of whole responses; set 1"
    if objective.compares_in_groups and sampling.samples < 2:
        why = f"objective.baseline={objective.baseline!r} compares the responses to a prompt and needs at least 2; set "
        yield "sampling.samples", f"{why}sampling.samples = 8, or objective.baseline = 'critic'"
    if recipe.evaluation.demonstrations is not None and not recipe.evaluation.rows:
        why = "evaluation.rows=0 switches evaluation off; set evaluation.rows, for example to 256, or unset this"
        yield "evaluation.demonstrations", why
    if recipe.mixing.sft_coefficient and recipe.mixing.demonstrations is None:
        why = "weighs demonstrations, and there are none; name their file with mixing.demonstrations, or set 0"
        yield "mixing.sft_coefficient", why
    if reference.target is not None and not reference.beta:
        yield "reference.target", "adapting multiplies β, and reference.beta=0 stays 0; set reference.beta above 0"
    if reference.target is not None and reference.horizon < responses:
        why = f"β would change too much at once and could become negative; set at least the {responses} responses of an "
        yield "reference.horizon", f"{why}iteration"
    if reason := _not_idle(recipe):
        yield "offload", f"names {reason}"
    if sampling.old_log_probs == "update" and (reader := _reads_old_log_probs(recipe)):
        yield "sampling.old_log_probs", f"computes no log π_old, and {reader}; set 'auto'"
    if recipe.reward.missing_eos == "bootstrap" and not recipe.has_critic:
        yield "reward.missing_eos", "needs a critic; set objective.baseline = 'critic', or penalty"
    if not recipe.reward.terms and recipe.turns.environment is None:
        example = "reward.terms = [{ function = 'file.py:function' }]"
        raise SurefootError(f"reward: is missing; set it, for example {example}, or turns.environment, which rewards turns")
    for place, term in enumerate(recipe.reward.terms):
        if error := term_error(term):
            raise SurefootError(f"reward.terms[{place}]{error}")


def _sampler(recipe: LanguageRecipe) -> Faults:
    engine, sharding, server = recipe.sampling.engine, recipe.sharding, recipe.server
    if recipe.samples_on_server and recipe.model == "pocket":
        why = "model='pocket' has no folder that vLLM can serve; first train it with kind = 'sft', then name that run"
        yield "sampling.engine", why
    if sharding is not None and (recipe.samples_on_server or engine == "continuous"):
        yield "sampling.engine", f"needs whole models, and sharding={sharding!r}; set 'auto', without a [server]"
    if engine == "packed" and recipe.low_weights:
        why = f"computes in float32, and precision={recipe.precision!r} has weights in bfloat16; set engine = 'auto'"
        yield "sampling.engine", why
    if server is not None and server.token_from is not None and (error := token_error(server.token_from)):
        raise SurefootError(f"server{error}")
    if recipe.sampling.rows is not None and recipe.samples_on_server:
        yield "sampling.rows", "the server bounds its own rows; unset it, and set --max-num-seqs of vllm serve"
    if recipe.sampling.ahead and not recipe.samples_on_server:
        yield "sampling.ahead", "needs a vLLM server, which samples beside the learner; add [server], or set 0"


def _not_idle(recipe: LanguageRecipe) -> str | None:
    """Why a role that ``offload`` names can't rest on the CPU, with the remedy: it must be a model of its own."""
    roles, in_use = recipe.idle_roles, "and that is always in use"
    reference, reward, critic = ("reference" in roles, "reward" in roles, "critic" in roles)
    terms, sharding, adapters = recipe.reward.terms, recipe.sharding, recipe.adapter is not None
    own = recipe.reference.model is not None
    reasons = {
        "the reference, and nothing reads one; leave it out": reference and not recipe.has_reference,
        f"the reference, which is the base of the adapters, {in_use}; leave it out": reference and adapters and not own,
        "the reward, and no term of reward.terms is a model; leave it out": reward and all(t.model is None for t in terms),
        f"the critic, and {recipe.algorithm} has none; leave it out": critic and not recipe.has_critic,
        f"the critic, which is on the base of the adapters, {in_use}; leave it out": critic and adapters,
        f"the critic, which is a head on the policy's model, {in_use}; set critic.own_model = true, or leave it out": (
            critic and not recipe.critic.own_model
        ),
        f"the critic, which is sharded with the policy by sharding={sharding!r}; set offload = true, or unset sharding": (
            critic and sharding is not None
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _reads_old_log_probs(recipe: LanguageRecipe) -> str | None:
    """What reads log π_old before the update."""
    objective, beta = recipe.objective, recipe.reference.beta
    readers = {
        "objective.trust_region is a KL penalty": objective.penalty is not None,
        "objective.baseline='pair' compares it with the reference's": objective.baseline == "pair",
        "objective.importance_cap is set": objective.importance_cap is not None,
        "objective.reuse makes several updates per batch": objective.reads_old_log_probs,
        "the critic's values come from the same pass": recipe.has_critic,
        f"reference.beta={beta:g} puts a KL into the reward": beta > 0,
    }
    return next((reader for reader, reads in readers.items() if reads), None)
