"""The llama.cpp side of `quantize.py`: its own quantizer. Knows nothing of Ropewalk.

    /path/to/python worker_quantize.py SOURCE.gguf TARGET.gguf FILE_TYPE THREADS

runs in an environment that has llama-cpp-python; FILE_TYPE is a number of `general.file_type`. Prints the seconds.
"""

import ctypes
import os
import sys
import time

import llama_cpp

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
source, target, file_type, threads = sys.argv[1:]
options = llama_cpp.llama_model_quantize_default_params()
options.ftype, options.nthread, options.allow_requantize = int(file_type), int(threads), True
start = time.perf_counter()
if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(options)):
    sys.exit(f"llama.cpp could not quantize {source}")
answers.write(f"{time.perf_counter() - start}\n")
answers.close()
