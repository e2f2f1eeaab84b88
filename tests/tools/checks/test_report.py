"""A report is a table with one row per check, and the problems below their rows."""

from moe_dualpipe.tools.checks import Check, Report

PROBLEM = "layer 2, segment mlp: the output of token 5 differs"
CHECKS = (
    Check("pp=2 equals one process", "passed", "gradients 2e-16 of 1e-13"),
    Check("ep=2 equals ep=1", "failed", "logits 0.2 of 1e-6", f"{PROBLEM}\n" * 3),
    Check("host sync", "warning", "3 calls"),
    Check("ep=4 equals ep=1", "skipped", problem="6 experts cannot be divided over 4 ranks"),
)


def test_a_table_has_a_row_for_each_check_and_says_what_is_wrong():
    report = Report("tiny: 4 layers", CHECKS)
    assert not report.passed and Report("tiny", CHECKS[2:]).passed  # warnings and skipped checks are not failures
    assert str(report).splitlines() == [
        "tiny: 4 layers",
        "check                    result   measured",
        "pp=2 equals one process  passed   gradients 2e-16 of 1e-13",
        "ep=2 equals ep=1         FAILED   logits 0.2 of 1e-6",
        rf"    {PROBLEM}\n{PROBLEM}\nlayer 2,",
        r"    segment mlp: the output of token 5 differs\n",
        "host sync                warning  3 calls",
        "ep=4 equals ep=1         skipped",
        "    6 experts cannot be divided over 4 ranks",
        "1 passed, 1 failed, 1 warning, 1 skipped",
    ]
