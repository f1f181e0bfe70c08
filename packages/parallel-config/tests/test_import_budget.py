"""Reading a config costs no torch."""

import subprocess
import sys


def test_the_package_imports_neither_torch_nor_accelerate():
    code = (
        "import sys, parallel_config, parallel_config.codec, parallel_config.environment\n"
        "heavy = {'torch', 'accelerate', 'tyro', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
