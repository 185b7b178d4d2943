"""vLLM's own transfer of weights over NCCL, from the trainer's GPU to those of a server. It has not run on a GPU yet."""

import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from surefoot.errors import SurefootError, cause_of
from surefoot.language.http_client import is_local


class Routes:
    """The calls by which vLLM's transfer drives the server: its ``VLLMWeightSyncClient``, with this run's token and errors.

    post   sends a table to a path of the server, once: a repeated call would wait for a broadcast that is over
    """

    def __init__(self, post: Callable[[str, dict[str, Any]], Any]) -> None:
        self.post = post

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the server's workers join; returns when they have."""
        self.post("init_weight_transfer_engine", {"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        """Let them leave."""
        self.post("shutdown_weight_transfer_engine", {})

    def start_weight_update(self) -> None:
        """Prepare the server's model."""
        self.post("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive weights; returns when they have arrived."""
        self.post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Put the weights to use."""
        self.post("finish_weight_update", {} if weight_version is None else {"weight_version": weight_version})


def check_device(model: Any) -> None:
    """Raise SurefootError if the model is not on a GPU of NVIDIA."""
    device = model.get_input_embeddings().weight.device
    if device.type != "cuda":
        raise SurefootError(f"server.transfer='nccl': needs the policy on an NVIDIA GPU, and it is on {device}; set 'folder'")


def connect(model: Any, routes: Routes, url: str, workers: int) -> Any:
    """vLLM's sender, connected with the server's GPUs; its ``send_weights()`` sends all parameters.

    workers   GPUs of the server

    Raises SurefootError if vLLM is not installed beside Surefoot, or is of another version.
    """
    try:
        from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    except ImportError as error:
        raise SurefootError(
            f"server.transfer='nccl': needs vLLM 0.32 in the trainer's environment too ({cause_of(error)}); install it, or set "
            "'folder'"
        ) from None
    info = NCCLTrainerInitInfo(own_address(url), _free_port(), workers + 1, rank=0)
    return WeightTransferTrainerFactory.trainer_init(init_info=info, client=routes, source=ModuleSource(model))


def own_address(url: str) -> str:
    """The address of this machine, as the server at ``url`` reaches it."""
    if is_local(url):
        return "127.0.0.1"
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:  # sends nothing
        route.connect((parts.hostname, parts.port or 80))
        return str(route.getsockname()[0])


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
