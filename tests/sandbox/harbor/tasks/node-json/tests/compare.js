const found = JSON.parse(require("fs").readFileSync(process.argv[2], "utf8"));
process.exit(Object.keys(found).length === 2 && found.a === 5 && found.b === 5 ? 0 : 1);
