"""A bar over images and rows, with the time left, on stderr: stdout holds the report alone."""

from typing import Any

from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SPEED_WINDOW_S = 300  # the time left is estimated from the last so many seconds


class Bar(ProgressBar):
    """Counts images times rows; Lightning shows it during a test, on the first process."""

    def __init__(self) -> None:
        """Make it, not yet seen."""
        super().__init__()
        self.rows = 1
        self.progress = Progress(
            BarColumn(),
            TextColumn(
                "{task.fields[images]:.0f} of {task.fields[size]} images, {task.description}", markup=False
            ),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            speed_estimate_period=SPEED_WINDOW_S,
        )
        self.task = self.progress.add_task("", total=None, images=0, size=0)

    def disable(self) -> None:
        """Show nothing: another process does."""
        self.progress.disable = True

    def begin(self, images: int, rows: int, done: int) -> None:
        """Say how much there is.

        Args:
            images: Of this process.
            rows: How many go through the images.
            done: Images times rows that an earlier run did.
        """
        self.rows = max(rows, 1)
        self.progress.update(self.task, total=images * rows, size=images)
        self.advance("", done)
        self.progress.start()

    def advance(self, row: str, images: int) -> None:
        """Count a batch of one row.

        Args:
            row: Its label.
            images: In the batch.
        """
        done = self.progress.tasks[0].completed + images
        self.progress.update(self.task, completed=done, images=done / self.rows, description=row)

    def say(self, what: str) -> None:
        """Say what is being done instead of images.

        Args:
            what: A few words.
        """
        self.progress.update(self.task, description=what)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave its last state on the screen."""
        self.progress.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same, where the run failed."""
        self.progress.stop()
