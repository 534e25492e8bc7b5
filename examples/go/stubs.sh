#!/bin/sh
# Makes the stubs of ../../proto in tickwheel/. Needs protoc with the plugins protoc-gen-go and protoc-gen-go-grpc;
# another protoc: PROTOC="python -m grpc_tools.protoc" ./stubs.sh
set -eu
cd "$(dirname "$0")"
module=example.com/reminders
files="common scheduler consumer admin"
set -- -Itickwheel/proto=../../proto --go_out=. --go-grpc_out=. --go_opt="module=$module" --go-grpc_opt="module=$module"
for file in $files; do
  # The files name no Go package: M says which one each is.
  set -- "$@" "--go_opt=Mtickwheel/proto/$file.proto=$module/tickwheel"
  set -- "$@" "--go-grpc_opt=Mtickwheel/proto/$file.proto=$module/tickwheel" "tickwheel/proto/$file.proto"
done
${PROTOC:-protoc} "$@"
