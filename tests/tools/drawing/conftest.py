from pathlib import Path

import pytest

from tests.support.browser import INSTALL, browser, programs

RECORDER = Path(__file__).parents[2] / "support" / "canvas_recorder.js"


@pytest.fixture(scope="session")
def running_browser(tmp_path_factory):
    """A browser that notes what pages draw. The test is skipped if no browser is installed."""
    if programs() is None:
        pytest.skip(INSTALL)
    with browser(tmp_path_factory.mktemp("browser")) as page:
        page.before_scripts(RECORDER.read_text())
        yield page


@pytest.fixture
def page(running_browser):
    """The browser. The test fails if the console showed anything, such as an exception."""
    running_browser.errors()
    yield running_browser
    assert running_browser.errors() == []
