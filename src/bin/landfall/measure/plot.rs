//! Diagrams as SVG: lines over a logarithmic axis, and bars. Readable on light and on dark paper: colours follow the reader's scheme.
//!
//! No library: a diagram is a string of a few hundred lines, and what it needs of SVG is lines, text and a style sheet.

use std::fmt::Write as _;

use super::units::digits;

/// A line of a diagram.
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
    /// Drawn with dashes: beside another one that it belongs to.
    pub(crate) dashed: bool,
}

/// Lines over a logarithmic horizontal axis.
pub(crate) struct Lines {
    pub(crate) title: String,
    /// What was measured, under the title.
    pub(crate) about: String,
    pub(crate) x: &'static str,
    pub(crate) y: &'static str,
    /// The label of a place on the horizontal axis.
    pub(crate) label: fn(f64) -> String,
    pub(crate) log_y: bool,
    pub(crate) series: Vec<Series>,
}

/// A bar.
pub(crate) struct Bar {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) best: bool,
}

/// Horizontal bars, one under the other.
pub(crate) struct Bars {
    pub(crate) title: String,
    pub(crate) about: String,
    pub(crate) unit: &'static str,
    pub(crate) bars: Vec<Bar>,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 360.0;
/// Around the field of a diagram: left, right, top, bottom. There is room for the labels of its corners.
const LEFT: f64 = 76.0;
const RIGHT: f64 = 40.0;
const TOP: f64 = 78.0;
const BOTTOM: f64 = 52.0;

/// Colours that can be told apart by those who see few of them (Okabe and Ito), a little lighter on dark paper.
const STYLE: &str = "\
<style>
text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:15px;font-weight:600}.about{fill:#666}.paper{fill:#fff}
.grid{stroke:#ddd;stroke-width:1}.axis{stroke:#888;stroke-width:1}.line{fill:none;stroke-width:2}.dashed{stroke-dasharray:5 4}
.s0{stroke:#0072b2}.s1{stroke:#d55e00}.s2{stroke:#009e73}.s3{stroke:#cc79a7}
.d0{fill:#0072b2}.d1{fill:#d55e00}.d2{fill:#009e73}.d3{fill:#cc79a7}.bar{fill:#7fb2d6}.best{fill:#d55e00}
@media (prefers-color-scheme:dark){text{fill:#ddd}.about{fill:#aaa}.paper{fill:#16191d}.grid{stroke:#333}.axis{stroke:#888}
.s0{stroke:#56b4e9}.s1{stroke:#f0884a}.s2{stroke:#3dc79b}.s3{stroke:#e0a3c4}
.d0{fill:#56b4e9}.d1{fill:#f0884a}.d2{fill:#3dc79b}.d3{fill:#e0a3c4}.bar{fill:#3f6f91}.best{fill:#f0884a}}
</style>
";

/// A document of diagrams, one under the other.
pub(crate) fn document(diagrams: &[Lines]) -> String {
    let height = HEIGHT * diagrams.len() as f64;
    let mut body = String::new();
    for (n, diagram) in diagrams.iter().enumerate() {
        let _ = writeln!(body, "<g transform=\"translate(0 {})\">", n as f64 * HEIGHT);
        diagram.draw(&mut body);
        body.push_str("</g>\n");
    }
    wrap(height, &body)
}

fn wrap(height: f64, body: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         role=\"img\">\n{STYLE}<rect class=\"paper\" width=\"{WIDTH}\" height=\"{height}\"/>\n{body}</svg>\n"
    )
}

/// An axis: its range, and the places that are labelled.
struct Axis {
    from: f64,
    to: f64,
    log: bool,
    ticks: Vec<f64>,
}

impl Axis {
    /// Where `value` is, from 0 to 1.
    fn at(&self, value: f64) -> f64 {
        let place = |v: f64| if self.log { v.max(f64::MIN_POSITIVE).log2() } else { v };
        let (from, to) = (place(self.from), place(self.to));
        if to > from { ((place(value) - from) / (to - from)).clamp(0.0, 1.0) } else { 0.5 }
    }

    /// From 0 to above the greatest.
    fn linear(greatest: f64) -> Self {
        let step = step(greatest / 5.0);
        let steps = (greatest / step).ceil().max(1.0);
        let ticks = (0..=steps as u32).map(|n| f64::from(n) * step).collect();
        Self { from: 0.0, to: steps * step, log: false, ticks }
    }

    /// Whole decades around all values.
    fn decades(least: f64, greatest: f64) -> Self {
        let (low, high) = (least.log10().floor() as i32, greatest.log10().ceil() as i32);
        let high = high.max(low + 1);
        let ticks: Vec<f64> = (low..=high).map(|power| 10f64.powi(power)).collect();
        Self { from: 10f64.powi(low), to: 10f64.powi(high), log: true, ticks }
    }

    /// From the least to the greatest, labelled at no more than twelve of the values.
    fn octaves(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        values.dedup();
        let (from, to) = (values.first().copied().unwrap_or(1.0), values.last().copied().unwrap_or(2.0));
        let every = values.len().div_ceil(12).max(1);
        Self { from, to, log: true, ticks: values.into_iter().step_by(every).collect() }
    }
}

/// The least of 1, 2, 5 and their tenfolds that is at least `about`.
fn step(about: f64) -> f64 {
    let ten = 10f64.powf(about.max(1e-9).log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|n| n * ten)
        .find(|step| *step >= about * 0.999)
        .unwrap_or(10.0 * ten)
}

impl Lines {
    fn draw(&self, out: &mut String) {
        let usable = |&(x, y): &(f64, f64)| x > 0.0 && y > 0.0 && x.is_finite() && y.is_finite();
        let points = || self.series.iter().flat_map(|s| &s.points).filter(|p| usable(p));
        let x_axis = Axis::octaves(points().map(|p| p.0).collect());
        let greatest = points().map(|p| p.1).fold(f64::MIN_POSITIVE, f64::max);
        let least = points().map(|p| p.1).fold(greatest, f64::min);
        let y_axis = if self.log_y { Axis::decades(least, greatest) } else { Axis::linear(greatest) };
        let right = WIDTH - RIGHT;
        let bottom = HEIGHT - BOTTOM;
        let x_at = |v: f64| LEFT + x_axis.at(v) * (right - LEFT);
        let y_at = |v: f64| bottom - y_axis.at(v) * (bottom - TOP);
        text(out, LEFT, 22.0, "start", "title", &self.title);
        text(out, LEFT, 40.0, "start", "about", &self.about);
        for &tick in &y_axis.ticks {
            let y = y_at(tick);
            let _ = writeln!(
                out,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>"
            );
            text(out, LEFT - 6.0, y + 4.0, "end", "", &digits(tick));
        }
        for &tick in &x_axis.ticks {
            let x = x_at(tick);
            let _ = writeln!(
                out,
                "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>"
            );
            text(out, x, bottom + 16.0, "middle", "", &(self.label)(tick));
        }
        let _ = writeln!(
            out,
            "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{bottom}\" y2=\"{bottom}\"/>"
        );
        let _ =
            writeln!(out, "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{LEFT}\" y1=\"{TOP}\" y2=\"{bottom}\"/>");
        text(out, (LEFT + right) / 2.0, HEIGHT - 14.0, "middle", "", self.x);
        let middle = (TOP + bottom) / 2.0;
        let _ = writeln!(
            out,
            "<text transform=\"translate(16 {middle:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            escape(self.y)
        );
        let mut legend = LEFT;
        for (n, series) in self.series.iter().enumerate() {
            let colour = n % 4;
            let dashed = if series.dashed { " dashed" } else { "" };
            let mut path = String::new();
            for (i, &(x, y)) in series.points.iter().filter(|p| usable(p)).enumerate() {
                let _ = write!(path, "{}{:.1} {:.1}", if i == 0 { "M" } else { "L" }, x_at(x), y_at(y));
                let _ = writeln!(
                    out,
                    "<circle class=\"d{colour}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"2.5\"/>",
                    x_at(x),
                    y_at(y)
                );
            }
            if !path.is_empty() {
                let _ = writeln!(out, "<path class=\"line s{colour}{dashed}\" d=\"{path}\"/>");
            }
            let _ = writeln!(out, "<path class=\"line s{colour}{dashed}\" d=\"M{legend:.1} 60h22\"/>");
            text(out, legend + 28.0, 64.0, "start", "", &series.name);
            legend += 28.0 + 7.0 * series.name.chars().count() as f64 + 18.0;
        }
    }
}

impl Bars {
    pub(crate) fn document(&self) -> String {
        const EACH: f64 = 20.0;
        const HEAD: f64 = 54.0;
        let longest = self.bars.iter().map(|bar| bar.name.chars().count()).max().unwrap_or(0) as f64;
        let left = (longest * 7.0 + 16.0).min(WIDTH * 0.6);
        let height = HEAD + 6.0 + EACH * self.bars.len() as f64 + 28.0;
        let greatest = self.bars.iter().map(|bar| bar.value).fold(f64::MIN_POSITIVE, f64::max);
        let axis = Axis::linear(greatest);
        let right = WIDTH - 56.0;
        let x_at = |v: f64| left + axis.at(v) * (right - left);
        let mut body = String::new();
        text(&mut body, 8.0, 22.0, "start", "title", &self.title);
        text(&mut body, 8.0, 40.0, "start", "about", &self.about);
        let bottom = height - 24.0;
        for &tick in &axis.ticks {
            let x = x_at(tick);
            let _ = writeln!(
                body,
                "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{HEAD}\" y2=\"{bottom}\"/>"
            );
            text(&mut body, x, height - 8.0, "middle", "", &digits(tick));
        }
        text(&mut body, WIDTH - 8.0, height - 8.0, "end", "", self.unit);
        for (n, bar) in self.bars.iter().enumerate() {
            let y = HEAD + 4.0 + EACH * n as f64;
            let class = if bar.best { "best" } else { "bar" };
            let wide = (x_at(bar.value) - left).max(0.0);
            text(&mut body, left - 8.0, y + 12.0, "end", "", &bar.name);
            let _ = writeln!(
                body,
                "<rect class=\"{class}\" x=\"{left:.1}\" y=\"{y:.1}\" width=\"{wide:.1}\" height=\"15\"/>"
            );
            text(&mut body, left + wide + 5.0, y + 12.0, "start", "", &digits(bar.value));
        }
        wrap(height, &body)
    }
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, class: &str, what: &str) {
    let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
    let _ = writeln!(
        out,
        "<text{class} x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
        escape(what)
    );
}

/// A peer's device may be called anything.
fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            // Which XML does not allow.
            c if c.is_control() => safe.push(' '),
            c => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_few_round_places() {
        let ticks = |greatest| Axis::linear(greatest).ticks;
        assert_eq!(ticks(4.2), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(ticks(10.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(Axis::decades(3.0, 400.0).ticks, [1.0, 10.0, 100.0, 1000.0]);
        assert_eq!(Axis::decades(10.0, 10.0).ticks, [10.0, 100.0]);
        let sizes: Vec<f64> = (1..=23).map(|n| f64::from(1 << n)).collect();
        let axis = Axis::octaves(sizes);
        assert_eq!((axis.ticks.len(), axis.at(2.0), axis.at(8_388_608.0)), (12, 0.0, 1.0));
        assert_eq!(Axis::octaves(vec![4096.0]).at(4096.0), 0.5);
    }

    #[test]
    fn text_of_others_is_escaped() {
        let diagram = Lines {
            title: "a<b> & \"c\"\u{7}".to_owned(),
            about: String::new(),
            x: "x",
            y: "y",
            label: |v| v.to_string(),
            log_y: true,
            series: vec![Series { name: "n<".to_owned(), points: vec![], dashed: true }],
        };
        let svg = document(&[diagram]);
        assert!(svg.contains("a&lt;b&gt; &amp; &quot;c&quot; </text>"), "{svg}");
        assert!(!svg.contains("n<"), "{svg}");
    }

    #[test]
    fn nothing_in_a_diagram_is_no_number() {
        let points = vec![(2.0, 0.0), (4.0, f64::NAN), (8.0, f64::INFINITY), (16.0, 3.0)];
        let series = || vec![Series { name: "s".to_owned(), points: points.clone(), dashed: false }];
        for log_y in [false, true] {
            let (title, label): (_, fn(f64) -> String) = (String::new(), |v| v.to_string());
            let about = String::new();
            let svg = document(&[Lines { title, about, x: "x", y: "y", label, log_y, series: series() }]);
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            assert_eq!(svg.matches("<circle").count(), 1);
        }
        let (title, about) = (String::new(), String::new());
        let none = Bars { title, about, unit: "GB/s", bars: vec![] }.document();
        assert!(!none.contains("NaN") && !none.contains("inf"), "{none}");
    }

    /// Where each text begins and ends, at a width of 7 for a character, which is more than a 12 px one has.
    fn extents(svg: &str) -> Vec<(String, f64, f64)> {
        let attribute = |text: &str, name: &str| -> Option<String> {
            let (_, rest) = text.split_once(&format!(" {name}=\""))?;
            Some(rest.split_once('"')?.0.to_owned())
        };
        let texts = svg.lines().filter(|line| line.starts_with("<text"));
        let placed = texts.filter_map(|line| {
            let x: f64 = attribute(line, "x")?.parse().ok()?;
            let content = line.split_once('>')?.1.split_once('<')?.0.to_owned();
            let wide = 7.0 * content.chars().count() as f64;
            let from = match attribute(line, "text-anchor")?.as_str() {
                "start" => x,
                "middle" => x - wide / 2.0,
                _ => x - wide,
            };
            Some((content, from, from + wide))
        });
        placed.collect()
    }

    #[test]
    fn no_label_is_cut_off_at_the_edge() {
        let points: Vec<_> = (1..=25).map(|n| (f64::from(1u32 << n), 12_345.0 * f64::from(n))).collect();
        for log_y in [false, true] {
            let series =
                vec![Series { name: "landed p50".to_owned(), points: points.clone(), dashed: false }];
            let svg = document(&[Lines {
                title: "Bandwidth of writes by size".to_owned(),
                about: "over tcp (soft-default), 1 queue pair".to_owned(),
                x: "bytes of a transfer",
                y: "GB/s",
                label: |bytes| super::super::units::show_bytes(bytes as u64),
                log_y,
                series,
            }]);
            let extents = extents(&svg);
            assert!(extents.iter().any(|(text, ..)| text == "32 MiB"), "{extents:?}");
            for (text, from, to) in extents {
                // The label of the vertical axis is in the first 24.
                let least = if text.chars().all(|c| c.is_ascii_digit()) { 20.0 } else { 0.0 };
                assert!(from >= least && to <= WIDTH, "{text}: {from} to {to}");
            }
        }
    }
}
