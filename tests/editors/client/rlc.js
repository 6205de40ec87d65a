"use strict";
// Stands for the compiler: `compile` and `report` write their -o, `--emit` prints; a program named wrong is refused.

const fs = require("fs");

const args = process.argv.slice(2);
const target = args.includes("-o") ? args[args.indexOf("-o") + 1] : "";
if (args.some((a) => a.startsWith("wrong"))) {
  process.stderr.write("error[RL0101]: unknown name `x`\n --> wrong.rlf:1:2\n");
  process.exit(1);
}
if (args.includes("slow.rlf")) {
  setTimeout(() => process.exit(0), 4000);
} else if (target) {
  fs.writeFileSync(target, `<html>${JSON.stringify({ args, cwd: process.cwd() })}`);
} else {
  process.stdout.write(JSON.stringify({ args, cwd: process.cwd(), plain: process.env.NO_COLOR }));
}
