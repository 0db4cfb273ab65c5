"""A verifier that executes the response, in the workers of test_score and test_hostile. The tests'
process never imports it."""

import builtins
import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

libc = ctypes.CDLL(None, use_errno=True)
MODULES = (builtins, ctypes, json, mmap, os, resource, signal, socket, subprocess, sys, tempfile)
MODULES += (threading, time)


def act(row: dict, response: str):
    """Returns the value of an expression, or 0.5 after statements that set no `value`."""
    names = {**{module.__name__: module for module in MODULES}, "libc": libc, "value": 0.5}
    try:
        code = compile(response, "response", "eval")
    except SyntaxError:
        exec(response, names)
        return names["value"]
    return eval(code, names)
