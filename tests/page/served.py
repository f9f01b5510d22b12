"""``mmreplay view`` in a process of its own, and requests to it."""

import http.client
import json
import os
import subprocess
import sys
import time


class Served:
    """The command, serving some buffers on a free port.

    Attributes:
        process: The server.
        port: Its port.
        cookie: Header that lets requests in.
    """

    def __init__(self, *arguments, before=(), python=(), env=None):
        command = [
            *before,
            sys.executable,
            *python,
            "-m",
            "mmreplay",
            "view",
            *map(str, arguments),
            "--no-open",
            "--port",
            "0",
        ]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {}),
        )
        line = self.process.stdout.readline()
        assert line.startswith("Open http://127.0.0.1:"), self.process.communicate()
        port, token = line.split()[1].split(":")[2].split("/?token=")
        self.port = int(port)
        self.cookie = f"mmreplay-{port}={token}"

    def get(self, path):
        """Return status and body of an answer."""
        for _ in range(200):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            try:
                connection.request("GET", path, headers={"Cookie": self.cookie})
                response = connection.getresponse()
                return response.status, response.read()
            except ConnectionError:
                # The server is about to listen, or is no more.
                assert self.process.poll() is None, self.process.communicate()
                time.sleep(0.05)
            finally:
                connection.close()
        raise AssertionError("the server does not answer")

    def json(self, path):
        """Return an answer with status 200."""
        status, body = self.get(path)
        assert status == 200, body
        return json.loads(body)

    def refused(self, path):
        """Return status and words of a refusal."""
        status, body = self.get(path)
        return status, json.loads(body)["error"]

    @property
    def anonymous_mib(self):
        """Memory of its own: rows that are mapped are the kernel's to drop."""
        with open(f"/proc/{self.process.pid}/status") as status:
            (line,) = (line for line in status if line.startswith("RssAnon"))
        return int(line.split()[1]) / 1024

    def close(self):
        """End it; return what it printed to stderr."""
        if not self.process.stderr.closed:
            self.process.kill()
            self._printed = self.process.communicate()[1]
        return self._printed
