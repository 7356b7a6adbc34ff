from integration.train.metrics import METRICS_FILE, MetricsFile, StepRecord, read_metrics


def record(step):
    return StepRecord(step=step, loss=1 / 3 + step, seconds=0.5, tokens=64)


def write(folder, steps, *, keep_steps=0):
    metrics = MetricsFile(folder, keep_steps=keep_steps)
    for step in steps:
        metrics.append(record(step))
    metrics.close()


def test_losses_read_back_as_the_same_bits(tmp_path):
    write(tmp_path, [1, 2])
    assert read_metrics(tmp_path) == [record(1), record(2)]


def test_records_are_readable_while_the_run_goes_on(tmp_path):
    metrics = MetricsFile(tmp_path, keep_steps=0)
    metrics.append(record(1))
    assert read_metrics(tmp_path) == [record(1)]
    metrics.close()


def test_a_resumed_run_drops_the_steps_that_it_repeats(tmp_path):
    write(tmp_path, [1, 2, 3])
    write(tmp_path, [3, 4], keep_steps=2)
    assert [r.step for r in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_a_line_cut_by_a_kill_is_left_out(tmp_path):
    write(tmp_path, [1, 2])
    path = tmp_path / METRICS_FILE
    path.write_text(path.read_text()[:-5])
    assert [r.step for r in read_metrics(tmp_path)] == [1]


def test_a_folder_without_metrics_has_none(tmp_path):
    assert read_metrics(tmp_path) == []
