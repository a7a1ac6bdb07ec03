"""HTTP only: it talks to `worker.supervisor`, never to native code."""
