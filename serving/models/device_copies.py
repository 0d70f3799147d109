"""One ranking model on every device where replicas score with it."""

from __future__ import annotations

import copy
import threading

import torch

from serving.models.ranking_model import RankingModel

CPU = torch.device("cpu")


class DeviceCopies:
    """Copies of a ranking model by device, made when they are first asked for. Thread-safe.

    Args:
        original: on the CPU, ready to score; never changed.
    """

    def __init__(self, original: RankingModel) -> None:
        self._lock = threading.Lock()
        self._by_device: dict[torch.device, RankingModel] = {CPU: original}

    def on(self, device: torch.device) -> RankingModel:
        """The model on a device; the same object for all who ask, which they must not change.

        Args:
            device: `cpu`, or a CUDA device with its index.
        """
        with self._lock:
            found = self._by_device.get(device)
            if found is None:
                found = copy.deepcopy(self._by_device[CPU]).to(device)
                found.pack()
                self._by_device[device] = found
        return found
