"""What of a recipe may leave this machine: one list of harmless fields. Whatever is not on it stays here.

This module imports no torch.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import PurePath, PureWindowsPath
from typing import Any
from urllib.parse import urlsplit, urlunsplit

_ARGUMENTS = """
add_generation_prompt api_version deployment documents effort enable_thinking engine format frequency_penalty greedy
keyword lang language max_tokens min_p min_tokens model n page partition_key presence_penalty reasoning_effort
repetition_penalty samples seed sort_key stop temperature thinking thinking_budget top_k top_p v version
answer band bonus case coefficient column columns depth digits end_token eos_token_id even every first guesses highest
ignore_case last least length longest lowest max_digits max_length max_turns maximum min_length minimum most numbers
operations pad_token_id partial pattern penalty points precision range reward rounds rows score seconds shortest split
steps strict target tests timeout tolerance turns unit units weight weights
assets autoreset bet board_size bounds camera_id camera_name colors contact_cost_range contact_cost_weight
contact_force_range continuing_task continuous control_cost_weight ctrl_cost_weight death_cost default_camera_config desc
difficulty disable_env_checker discrete distance_threshold domain_name domain_randomize dt enable_wind episode_length
exclude_current_positions_from_observation fickle_passenger forward_reward_weight frame_skip frame_stack frameskip
full_action_space g goal goal_velocity grayscale_obs gravity grid hardcore healthy_angle_range healthy_reward
healthy_state_range healthy_z_range height horizon impact_cost_range impact_cost_weight include_cfrc_ext_in_observation
include_cinert_in_observation include_cvel_in_observation include_qfrc_actuator_in_observation is_rainy is_slippery
lap_complete_percent level main_body map_name mass max_episode_steps max_speed maze_map mode natural noise noop_max
num_envs obs_type observation_type physics play players position_noise_threshold probability render_mode
repeat_action_probability reset_noise_scale reset_target reward_control_weight reward_dist_weight reward_near_weight
reward_type sab scale scale_obs screen_size shape size sparse speed stack states sutton_barto_reward task task_name
terminal_on_life_loss terminate_when_unhealthy turbulence_power uph_cost_weight use_contact_forces velocity width
wind_power xml_file
"""
HARMLESS = frozenset(_ARGUMENTS.split())
"""names of arguments of a person's environments and functions, and of parameters in a URL, whose values may be published: of
chats, servers and judges; of rewards, verifiers and tasks with several turns; of environments"""
_FIELDS = """
kind algorithm device engine precision sharding offload task start model head demonstrations objective.baseline
objective.trust_region objective.trust_region.schedule objective.trust_region.kind objective.ratio objective.importance_mode
objective.normalise_advantages objective.kl_estimator objective.reference_estimator objective.aggregation optimizer.kind
optimizer.schedule rollout.backend rollout.info rollout.symmetry network.activation network.custom network.actor_parts
network.critic_parts normalise.observations evaluation.demonstrations adapter.targets adapter.quantize data.columns
data.control_tokens data.answers data.train data.held_out sampling.stop sampling.old_log_probs sampling.engine server.model
turns.environment reward.terms.model reward.terms.label reward.terms.function reward.terms.url
reward.terms.judge.model reward.terms.judge.prompt reward.terms.judge.pattern reward.terms.judge.key
reward.terms.judge.against reward.terms.per reward.terms.separator reward.missing_eos reward.gold reference.model critic.start
critic.label mixing.demonstrations preference.loss preference.separator turns.tools preferences.judge preferences.terminations
cloning.data
"""
TEXTS = frozenset(_FIELDS.split())
"""fields of recipes whose text may be published, without what names a folder or an address of this machine"""
ARGUMENTS = ("environment", "turns.arguments", "reward.terms.arguments")
"""fields of recipes that hold arguments by name"""
ENVIRONMENT = ("python", "platform", "processor", "versions", "seed", "threads", "engine", "ranks")
"""entries of environment.json that may be published"""
TOKEN = re.compile(r"\b(hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|xox[abp]-[\w-]{10,}|AKIA[0-9A-Z]{16})")
"""access tokens, which are not published wherever they stand"""
RANDOM_VALUE = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z\d]{20,}")
"""a generated value: a run of 20 or more letters and digits, with at least one of each"""
REMOVED = "removed"


def is_harmless(name: str, also: Collection[str] = ()) -> bool:
    """Whether the value of an argument of this name may be published; ``sortKey`` and ``sort-key`` are ``sort_key``.

    also   further names, as a person wrote them
    """
    plain = re.sub(r"[\W_]+", "_", re.sub(r"([a-z\d])([A-Z])", r"\1_\2", name)).strip("_").lower()
    return name in also or plain in HARMLESS


def public_table(
    table: Mapping[str, Any], also: Collection[str] = (), places: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables of a recipe as they may be published; and each field that was changed, with what it is now.

    also     names of further arguments that may be published
    places   keep the names of folders and addresses of this machine
    """
    changed: dict[str, Any] = {}

    def text(value: str, harmless: bool) -> str:
        return REMOVED if not harmless or TOKEN.search(value) else value if places else without_place(value)

    def arguments(value: Any, field: str, harmless: bool) -> Any:
        if value in (None, "none") or isinstance(value, bool):
            return value
        if harmless and isinstance(value, Mapping):
            return {key: arguments(part, f"{field}.{key}", is_harmless(key, also)) for key, part in value.items()}
        if harmless and isinstance(value, (list, tuple)):
            return [arguments(part, f"{field}.{index}", True) for index, part in enumerate(value)]
        shown = text(value, harmless) if isinstance(value, str) else value if harmless else REMOVED
        if shown != value:
            changed[field] = shown
        return shown

    def settings(value: Any, field: str, kind: str) -> Any:
        if kind in ARGUMENTS:
            return arguments(value, field, True)
        if isinstance(value, Mapping):
            own = kind in TEXTS  # a table of names and texts, such as data.columns
            return {
                key: settings(part, f"{field}.{key}" if field else key, kind if own else f"{kind}.{key}" if kind else key)
                for key, part in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [settings(part, f"{field}.{index}", kind) for index, part in enumerate(value)]
        shown = text(value, kind in TEXTS) if isinstance(value, str) and value != "none" else value
        if shown != value:
            changed[field] = shown
        return shown

    return settings(dict(table), "", ""), changed


def without_place(text: str) -> str:
    """A value of a recipe without the folders of this machine: the last part of a path, an address without its password."""
    if re.match(r"hf:/{1,2}", text):  # the @ of a revision is no password
        return text
    if re.match(r"(?i)[a-z][a-z0-9+.-]*://", text):
        parts = urlsplit(text)
        if parts.scheme == "file":
            return PurePath(parts.path).name
        host = parts.netloc.rpartition("@")[2]
        path = "" if parts.scheme in ("http", "https") and RANDOM_VALUE.search(parts.path) else parts.path
        kept = (host, path) == (parts.netloc, parts.path) and not parts.query
        return text if kept else urlunsplit((parts.scheme, host, path, "", ""))
    if re.match(r"[A-Za-z]:[\\/]|\\\\", text):
        return PureWindowsPath(text).name
    if text.startswith(("/", "~", "..")):
        return PurePath(text).name
    return text
