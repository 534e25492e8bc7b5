"""`python -m tickwheel.console`: as `tickwheel console`."""

from tickwheel.console.cli import app

if __name__ == "__main__":
    app(prog_name="tickwheel console")
