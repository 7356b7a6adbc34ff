"""The shares of idle time that the papers of the schedules give."""


def expected_bubble(schedule: str, ranks: int, microbatches: int, per_rank: int) -> float | None:
    """Return the share of the ranks' time that is idle, with stages that take equally long.

    Where a backward is split its halves take as long as a forward each; sending takes nothing.

    Sources: GPipe (arXiv 1811.06965), section 2.3, and 1F1B; interleaved 1F1B of Megatron-LM (arXiv
    2104.04473), section 2.2; zero bubble (arXiv 2401.10241), table 2, ZB-H1, interleaved, and
    section 6, ZB-V; DualPipeV, the table in github.com/deepseek-ai/DualPipe.

    Args:
        schedule: its name.
        ranks: K.
        microbatches: M.
        per_rank: V, the stages of a rank.
    """
    wait, work = ranks - 1, per_rank * microbatches
    if schedule in ("GPipe", "1F1B", "Interleaved1F1B"):
        return wait / (work + wait)
    if schedule == "InterleavedZeroBubble":
        return wait / (3 * work + wait)  # (K - 1) (F + I - W) of (F + I + W) V M
    if schedule == "ZBVZeroBubble":
        return 0.0
    if schedule == "DualPipeV":
        return 2 * wait / (3 * work + 2 * wait)  # (K - 1) (F&B + B - 3 W), F&B = F + I + W
    return None
