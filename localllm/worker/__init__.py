"""The processes that own engines, and their supervisor. Only `main` reaches `compose`."""
