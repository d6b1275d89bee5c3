# Tables of several rounds: medians with the least and the most, and ratios taken inside one round.
#
#   awk -v spec=FILE -f ratios.awk ROUND.txt…     each round's file has `name value unit` lines; others are skipped
#
# FILE asks for rows, one a line; a row whose names were not measured is left out:
#   ratio|what|asked for|NAME|OTHER      NAME / OTHER of each round
#   factor|what|asked for|NAME|OTHER|NAME|OTHER      how many times the first ratio is the second
#   figure|what|asked for|NAME

# The n values under key k, in order.
function sorted(k, n,    i, j, v) {
  for (i = 1; i <= n; i++) s[i] = val[k, i]
  for (i = 2; i <= n; i++) {
    v = s[i]
    for (j = i - 1; j >= 1 && s[j] > v; j--) s[j + 1] = s[j]
    s[j + 1] = v
  }
}
function median(n) { return n % 2 ? s[(n + 1) / 2] : (s[n / 2] + s[n / 2 + 1]) / 2 }
function add(k, v) { val[k, ++count[k]] = v }
function row(what, asked, k,    n) {
  n = count[k]
  if (!n) return
  sorted(k, n)
  printf "| %s | %s | %.2f [%.2f to %.2f] | %d |\n", what, asked, median(n), s[1], s[n], n
}
function ratio(what, asked, a, b,    r, k) {
  k = "ratio " what SUBSEP a SUBSEP b
  for (r = 1; r <= rounds; r++) if ((a, r) in by && (b, r) in by && by[b, r] > 0) add(k, by[a, r] / by[b, r])
  row(what, asked, k)
}
function has(a, r) { return (a, r) in by && by[a, r] > 0 }
function factor(what, asked, a, b, c, d,    r, k) {
  k = "factor " what SUBSEP a SUBSEP b
  for (r = 1; r <= rounds; r++)
    if (has(a, r) && has(b, r) && has(c, r) && has(d, r)) add(k, by[a, r] / by[b, r] / (by[c, r] / by[d, r]))
  row(what, asked, k)
}
FNR == 1 { rounds++ }
/^#/ || NF != 3 || $2 !~ /^[0-9.]+$/ { next }
{
  if (!($1 in unit)) { names[++known] = $1; unit[$1] = $3 }
  add($1, $2 + 0)
  by[$1, rounds] = $2 + 0
}
END {
  print "\n| | asked for | median [least to most] | rounds |\n|---|---|---|---|"
  while ((getline wanted < spec) > 0) {
    split(wanted, field, "|")
    if (field[1] == "ratio") ratio(field[2], field[3], field[4], field[5])
    if (field[1] == "factor") factor(field[2], field[3], field[4], field[5], field[6], field[7])
    if (field[1] == "figure") row(field[2], field[3], field[4])
  }
  print "\n| | median | least | most | n | unit |\n|---|---|---|---|---|---|"
  for (i = 1; i <= known; i++) {
    n = count[names[i]]
    sorted(names[i], n)
    printf "| %s | %.3f | %.3f | %.3f | %d | %s |\n", names[i], median(n), s[1], s[n], n, unit[names[i]]
  }
}
