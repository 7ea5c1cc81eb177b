"""The notebook compare.ipynb, cell by cell. HILT_DEEP=1: by Jupyter itself, headless, where nbclient is."""

import contextlib
import io
import json
import os
import pathlib
import unittest

import support  # noqa: F401, one thread for torch

NOTEBOOK = pathlib.Path(os.environ["SRC"]) / "examples" / "embed" / "python" / "compare.ipynb"


class Notebook(unittest.TestCase):
    def test_cells(self):
        cells = json.loads(NOTEBOOK.read_text())["cells"]
        self.assertTrue(all(not c.get("outputs") for c in cells), "clear its outputs before a commit")
        printed, names = io.StringIO(), {}
        with contextlib.redirect_stdout(printed):
            for cell in cells:
                if cell["cell_type"] == "code":
                    exec("".join(cell["source"]), names)
        self.assertEqual(
            [line.split()[0] for line in printed.getvalue().splitlines()[-3:]], ["taped", "hybrid", "fused"]
        )

    @unittest.skipUnless(os.environ.get("HILT_DEEP"), "HILT_DEEP=1 runs Jupyter")
    def test_in_jupyter(self):
        try:
            import nbclient
            import nbformat
        except ImportError:
            self.skipTest("no nbclient; pip install nbclient ipykernel")
        notebook = nbformat.read(NOTEBOOK, 4)
        nbclient.NotebookClient(notebook, timeout=120).execute()
        shown = [o for c in notebook.cells for o in c.get("outputs", [])]
        self.assertTrue(any("text/html" in o.get("data", {}) and "<svg" in o["data"]["text/html"] for o in shown))


if __name__ == "__main__":
    unittest.main()
