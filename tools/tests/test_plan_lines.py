"""The zoo's plans are no longer than the paper's."""

import pytest

from tools.plan_lines import PAPER, ZOO, count, main


@pytest.mark.parametrize("name", PAPER)
def test_plans_are_no_longer_than_the_papers(name):
    built = count(name)
    assert 10 < built.lines <= PAPER[name]
    assert built.annotations > 0


def test_every_plan_of_the_zoo_is_printed(capsys):
    main()
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert {"dit", "gpt2", "llama", "vit"} <= set(printed)
    assert not {"experts", "requirements", "__init__"} & set(printed)
    assert (ZOO / "requirements.py").exists()
