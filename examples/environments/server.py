"""A tool server: a ledger in SQLite that answers over HTTP.

    python examples/environments/server.py 8765

POST /book {"account": "a", "amount": 3} books an amount, POST /balance {"account": "a"} returns the
sum. Each ledger is one client's: the header X-Ledger names it.
"""

import json
import sqlite3
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOCK = threading.Lock()
BOOKS = sqlite3.connect(":memory:", check_same_thread=False)
BOOKS.execute("create table entries (ledger text, account text, amount integer)")


class Ledger(BaseHTTPRequestHandler):
    def do_POST(self):
        size = int(self.headers["content-length"])
        asked = json.loads(self.rfile.read(size))
        key = self.headers["x-ledger"], asked["account"]
        with LOCK:
            if self.path == "/book":
                BOOKS.execute("insert into entries values (?, ?, ?)", (*key, asked["amount"]))
            total = "select coalesce(sum(amount), 0) from entries where ledger = ? and account = ?"
            ((balance,),) = BOOKS.execute(total, key)
        body = json.dumps({"balance": balance}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Ledger).serve_forever()
