"""What the tests of the named ops and of layer_norm both need, beside the reference."""

import threading

from reference import same_bits
from torch.utils._python_dispatch import TorchDispatchMode


def counting_backend():
    """A backend that runs the graph as it is and a list with one entry for each graph it was given."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    return backend, graphs


def wrong_results_of_two_threads(call, samples):
    """How many of 20 results each of two threads got wrong, each calling with a sample of its own at once."""
    expected = [call(*sample) for sample in samples]
    start = threading.Barrier(2)
    wrong = [None, None]

    def work(i):
        start.wait()
        wrong[i] = sum(not same_bits(call(*samples[i]), expected[i]) for _ in range(20))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


class OpLog(TorchDispatchMode):
    """The names of the ops of ours that pass, in `seen`."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastln":
            self.seen.append(func.name().removeprefix("fastln::"))
        return func(*args, **(kwargs or {}))
