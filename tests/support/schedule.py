"""Who runs what when tests run on several workers: a file on one worker; what must be undisturbed last, and alone.

Everything is one run of pytest: one summary, one exit status.
"""

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

UNDISTURBED = frozenset(
    {
        "tests/cluster/test_fault_campaign.py",  # sessions of 1.5 s under the load of four clients
        "tests/cluster/test_faults.py",  # a kill must fall into the middle of a prefill
        "tests/cluster/test_role_switch.py",  # the load of four clients, and how soon a switch has its effect
        "tests/cluster/test_silent_network.py",  # time until a silent peer is given up
        "tests/cluster/test_ucx_transfer.py",  # deadlines of seconds over gigabytes
        "tests/cluster/test_ucx_strangers.py",  # a stalled session's deadline, while a neighbour's goes on
        "tests/unit/router/api/test_app.py",  # how long the router answers nobody
    }
)
"""Files whose tests bound a time that other work on the machine would stretch."""


class FilesThenUndisturbed(LoadScopeScheduling):
    """Files in the order of collection. The undisturbed ones are one unit, the last: see `conftest.py`."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "undisturbed" if file in UNDISTURBED else file

    def _assign_work_unit(self, node: WorkerController) -> None:
        """The last unit goes to the last worker, once all others are done."""
        if next(iter(self.workqueue)) != "undisturbed":
            super()._assign_work_unit(node)
            return
        others = [other for other in self.nodes if other is not node]
        if not all(other.shutting_down for other in others):
            node.shutdown()
        elif not any(self._pending_of(self.assigned_work[other]) for other in others):
            super()._assign_work_unit(node)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        for other in self.nodes:  # one may have waited for this
            if self.workqueue:
                self._reschedule(other)
