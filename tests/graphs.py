"""CUDA graphs in tests: what they are captured and replayed with, and what a replay must leave."""

import cases
import numpy as np

NUM_SEQS, SHORT, LONG = 8, 128, 4096
LIVE = [0, 3, 6]  # of the replay's sequences; the others have ended


def captured(cupy, stream, call):
    """A graph of one call, after an eager one."""
    with stream:
        call()
        stream.begin_capture()
        call()
        return stream.end_capture()


def replay_in_turn(stream, replays):
    """Graphs one after the other, forwards and backwards: (graph, its arguments, given buffers, expected results).

    The arguments are there to live as long as the graph that has their addresses.
    """
    for graph, _, given, expected in [*replays, *reversed(replays)] * 3:
        with stream:
            for buffer in given.values():
                buffer.view(np.uint8).fill(0xFF)
        graph.launch(stream)
        stream.synchronize()
        assert_results(given, expected)


def assert_results(given, expected, num_tokens=None):
    """The first tokens' out and lse_out, or all, have the bits of an eager call's."""
    cases.assert_same_bits(given["out"].get()[:num_tokens], expected[0][:num_tokens])
    cases.assert_same_bits(given["lse_out"].get()[:, :num_tokens], expected[1][:, :num_tokens])
