#!/bin/sh
# Builds kube-apiserver, kube-controller-manager and kube-scheduler 1.20 for test_control_plane.py out of Debian 12's source
# package (newer ones have kubectl alone), into a folder. It needs network, root and some ten minutes on two cores.
#   sh control_plane.sh FOLDER
set -eu
mkdir -p "$1" && cd "$1"
apt-get install -y --no-install-recommends etcd-server golang-1.19-go golang-1.19-src make rsync
lists=$(mktemp -d)  # this host's sources of packages, as sources of source packages
mkdir -p "$lists/parts" "$lists/lists/partial"
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
  [ ! -f "$file" ] || sed 's/^Types: deb$/Types: deb-src/; s/^deb /deb-src /' "$file" >"$lists/parts/$(basename "$file")"
done
[ ! -f "$lists/parts/sources.list" ] || mv "$lists/parts/sources.list" "$lists/parts/host.list"
set -- -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$lists/parts" -o Dir::State::lists="$lists/lists"
apt-get "$@" update
apt-get "$@" source --download-only kubernetes
rm -rf "$lists" kubernetes && mkdir kubernetes
tar xzf kubernetes_*.orig.tar.gz -C kubernetes --strip-components 1
# The reflect2 in it reads maps in a way that Go 1.18 broke: the server would crash.
apt-get download golang-github-modern-go-reflect2-dev
dpkg -x golang-github-modern-go-reflect2-dev_*.deb reflect2
rm kubernetes/vendor/github.com/modern-go/reflect2/*.go kubernetes/vendor/github.com/modern-go/reflect2/*.s
cp reflect2/usr/share/gocode/src/github.com/modern-go/reflect2/*.go \
  reflect2/usr/share/gocode/src/github.com/modern-go/reflect2/*.s kubernetes/vendor/github.com/modern-go/reflect2
cd kubernetes
mkdir -p .go/src/k8s.io && ln -s ../../.. .go/src/k8s.io/kubernetes
PATH=/usr/lib/go-1.19/bin:$PATH GOPATH=$PWD/.go CGO_ENABLED=0 KUBE_GIT_VERSION=v1.20.2 GOPROXY=off \
  make WHAT="cmd/kube-apiserver cmd/kube-controller-manager cmd/kube-scheduler"
cp _output/bin/kube-apiserver _output/bin/kube-controller-manager _output/bin/kube-scheduler ..
