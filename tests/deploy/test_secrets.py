"""deploy/kubernetes/secrets.sh, alone in a folder: the users that it makes have the rights that docs/redis.md says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support.manifests import DEPLOY
from support.redis.roles import LINES


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make certificates with")
def test_it_needs_no_other_file_and_gives_the_documented_rights(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "kubernetes" / "secrets.sh", tmp_path)
    subprocess.run(["sh", "secrets.sh", "made", "mine"], cwd=tmp_path, check=True)
    users = [line.split() for line in (tmp_path / "made" / "users.acl").read_text().splitlines()]
    rights = {words[1]: words[4:] for words in users if words[1] in LINES}
    assert rights.keys() == {"producer", "worker", "publisher", "operator"}
    for role, given in rights.items():
        documented = LINES[role].replace("POOL", "mine").split()[3:]
        assert given == [*documented, "+wait", "+waitaof", "+eval", "+set", "+info", "+role"], role
