#!/usr/bin/env python3
"""Makes the site: stages public headers and READMEs as Doxygen reads them, runs it, and checks every link of what it
made.

  make.py INCLUDE OUT    INCLUDE: the tree of public headers, <hilt/..>, of a build; OUT: a directory of its own,
                         emptied first

Headers stay as they are written, and line by line as long; only for Doxygen
  - `// what it is` behind a declaration is its documentation, as `///` above it is;
  - a documented declaration speaks for overloads and specializations right below it;
  - members that share a line with their type need no words but that type's;
  - what means the same everywhere (PLAIN, below) needs no words;
  - `// ---- title ----` heads what follows, and the first free comment of a file is about the file.
What is private, or in a namespace `detail`, Doxygen leaves out by itself.
"""
import html.parser, os, re, shutil, subprocess, sys
from pathlib import Path
from urllib.parse import unquote

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
ROOMS = ['core', 'ops', 'nn', 'examples', 'tests', 'third_party']
TOKEN = re.compile(r'#(?:[^\n]*\\\n)*[^\n]*|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|(?<![0-9a-f])\'(?:\\.|[^\'\\])\'|\n|.',
                   re.S)

# Declarations that mean the same everywhere.
PLAIN = {
    r'= default\b': 'As the compiler makes it.',
    r'= delete\b': 'There is none.',
    r'\boperator==': 'Whether both hold the same.',
    r'\boperator<<': 'Prints it.',
    r'\boperator bool': 'Whether there is one.',
    r'^(\w+)\(\1&& *\w*\)|operator=\(\w+&&': 'Takes over what the other has.',
    r'^~\w+\(': 'Gives up what it holds.',
    r'\bvisit_parameters\(': 'Calls `visit` with the name, under `at`, and the tensor of each parameter.',
    r'\bparse_\w+\(': 'What the text names. Another word throws Code::usage, which lists all there are.',
    r'\bname_of\(': 'The name by which options and reports know it.',
    r'\bto_string\(': 'It as text.',
    r'^using \w+Ptr = ': 'Shared, and nothing changes it.',
    r'\bsize\(\) const': 'How many there are.',
}


def typed(text):
    """`See TYPE`, where a field or what returns it has the name of its type."""
    found = re.match(r'(?:inline |const |explicit )*([A-Z]\w*|DType)&? (\w+)(?:;| = |\{|\(\) const)', text)
    return f'See {found[1]}.' if found and found[1].lower() == found[2].replace('_', '') else ''


class Unit:
    """A declaration: where it starts and ends, its text without comments, whether it opens a scope, what is said of
    it."""

    def __init__(self, start, line, scope, above):
        self.start, self.line, self.scope, self.above = start, line, scope, above
        self.text, self.said, self.end_line = '', '', None


def bare(text):
    """A declaration without attributes and what stands in brackets."""
    text = re.sub(r'\[\[.*?\]\]', '', text, flags=re.S)
    for brackets in (r'\([^()]*\)', r'<[^<>]*>'):
        while (less := re.sub(brackets, '\1' if brackets[1] == '(' else '', text)) != text:
            text = less
    return ' '.join(text.split())


def opened(text):
    """Which scope `text {` opens: namespace, enum, class (or struct, union); none for functions and values."""
    text = bare(text)
    found = ('operator' not in text and '\1' not in text and '=' not in text
             and re.match(r'(?:inline |template |typedef )*(namespace|class|struct|enum|union)\b', text))
    return found[1] if found else None


def name_of(text):
    """What a declaration declares: overloads share it, specializations too."""
    if found := re.search(r'\boperator\s*(\(\)|[^\s(]+|\w+)', text):
        return 'operator' + found[1]
    text = bare(text)
    found = re.search('([~\\w]+)\\s*\1', text) or re.search(r'\b(?:struct|class|using)\s+(\w+)', text)
    return found and found[1]


def declarators(text):
    """`T a = 1, b` as [`T a = 1`, `T b`]; nothing for what is no list of variables in one line."""
    if '\n' in text or not text.endswith(';') or re.search(r'\b(operator|using|enum|friend)\b', text):
        return []
    depth, parts = 0, ['']
    for c in text[:-1]:
        depth += {'(': 1, '{': 1, '<': 1, ')': -1, '}': -1, '>': -1}.get(c, 0)
        if c == ',' and not depth:
            parts.append('')
        else:
            parts[-1] += c
    kind = re.match(r'(.*?[\w>])[ *&]+\w+(?:\s*[={\[].*)?$', parts[0])
    return parts[:1] + [kind[1] + ' ' + part.strip() for part in parts[1:]] if kind and '(' not in parts[0] else []


def units(text):
    """All declarations outside of bodies, in order, with their trailing comments."""
    found, scopes, unit, line, above, parens = [], [], None, 1, [], 0
    begun = []           # units that started on this line
    place = line_start = 0
    for token in TOKEN.findall(text):
        at, place = place, place + len(token)
        declares = all(scopes)
        if token == '\n':
            if not text[line_start:at].strip():
                above = []
            line, line_start, begun = line + 1, place, []
        elif token.startswith('#'):
            line += token.count('\n')
        elif token.startswith('//'):
            alone = not text[line_start:at].strip()
            if token.startswith('///') and alone:
                above.append(token[3:].strip())
            elif (not token.startswith('///') and not alone
                  and (declares or scopes.count(None) == 1 and unit and text[:at].rstrip().endswith('{'))):
                of = (unit if not declares else begun[0] if begun else unit
                      or (found[-1] if found and found[-1].end_line == line else None))
                if of:
                    of.said = (of.said + ' ' + token[2:].strip()).strip()
                    column = at - line_start
            elif (not token.startswith('///') and alone and declares and found and found[-1].said and not above
                  and found[-1].end_line == line - 1 and at - line_start == column):
                found[-1].said += ' ' + token[2:].strip()
                found[-1].end_line = line
        elif token.startswith('/*'):
            line += token.count('\n')
        else:
            if declares and not token.isspace() and unit is None and token not in ';}':
                unit = Unit(at, line, scopes[-1] if scopes else None, above)
                unit.kin = [u for u in begun if u.end_line is None or u.text.endswith('{')]
                begun.append(unit)
                above = []
            if unit and declares:
                unit.text += token
            parens += {'(': 1, ')': -1}.get(token, 0)
            ends = False
            if token == '{':
                scopes.append(opened(unit.text[:-1]) if unit and declares else None)
                ends = bool(scopes[-1])
            elif token == '}' and scopes:
                if declares and unit:  # the last enumerator
                    unit.text, unit.end_line = unit.text[:-1], line
                    found.append(unit)
                    unit = None
                scopes.pop()
                if all(scopes) and unit and not parens:
                    unit.text += '}'
                    ends = not re.match(r'\s*[;,{]', text[place:place + 80])
            elif token == ';' and declares:
                ends = unit is not None
            elif token == ',' and declares and unit and unit.scope == 'enum' and not parens:
                ends = True
            elif token == ':' and unit and unit.text in ('public:', 'private:', 'protected:'):
                unit = begun.pop() and None
            if ends:
                unit.end_line = line
                found.append(unit)
                unit = None
    return found


def header(text):
    """A header as Doxygen reads it: the same lines, and more comments."""
    inserts, told = [], None  # told: the documented declaration before, with what is said of it
    for unit in sorted(units(text), key=lambda u: u.start):
        words = unit.said
        same = (told and told[0] and told[0] == name_of(unit.text) and told[1] in (unit.line, unit.line - 1)
                and told[2] == unit.scope)
        if not words and not unit.above:
            if same:
                words = told[3]
            elif unit.kin and unit.scope == 'enum':
                words = '`' + unit.text.split('=')[0].strip(' ,\n') + '`'
            elif unit.kin:
                words = unit.kin[0].said or ' '.join(unit.kin[0].above)
            else:
                words = next((says for how, says in PLAIN.items() if re.search(how, unit.text)), '') or typed(unit.text)
        several = declarators(unit.text) if words or unit.above else []
        if len(several) > 1:
            of_each = words or ' '.join(unit.above)
            inserts.append((unit.start, len(unit.text), ' '.join(f'/** {of_each} */ {one};' for one in several)))
        elif words:
            inserts.append((unit.start, 0, '/** ' + words + ' */ '))
        if unit.kin:
            continue  # it is not what stands above the next line
        if words or unit.above:
            unit.said = unit.said or words
            told = (name_of(unit.text), unit.end_line, unit.scope, words or ' '.join(unit.above))
        elif not same:
            told = None
    for at, length, words in reversed(inserts):
        text = text[:at] + words + text[at + length:]
    lines, heading, about = re.sub(r'(?m)^( *///.*)', lambda m: m[1].replace('\\', r'\\'),
                                   text).split('\n'), False, None
    for i, line in enumerate(lines):
        if found := re.match(r'// ---- (.*?) -{2,}$', line):
            lines[i] = ('/**@}*/ ' if heading else '') + '/** @name ' + found[1].capitalize() + ' */ /**@{*/'
            heading = True
        elif line.startswith('}') and heading:
            lines[i], heading = '/**@}*/ ' + line, False
        elif line.startswith('namespace') and about is None:
            about = False
        elif line.startswith('// ') and about is None:
            about = i
            lines[i - 1] = '/** @file'
            while lines[i].startswith('//'):
                lines[i] = lines[i][2:]
                i += 1
            lines[i - 1] += ' */'
    if not about:
        lines[0] = '/** @file */'
    return '\n'.join(lines)


def slug(title):
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-')


def label(path):
    """The page of a Markdown file."""
    room = path.parent if path.name == 'README.md' else path.with_suffix('')
    return re.sub(r'\W', '_', str(room)) if path != Path('README.md') else 'index'


def copy_of(path):
    """Where the site has a file: a picture as it is, another as text."""
    return f'files/{path}' + ('' if path.suffix == '.png' else '.txt')


def page(path, pages, files):
    """A Markdown file as Doxygen reads it: a name for every heading, links to pages of the site and to copies of
    files."""
    def link(found):
        target, _, anchor = found[2].partition('#')
        if re.match(r'[a-z]+:', found[2]):
            return found[0]
        there = Path(os.path.normpath(path.parent / target)) if target else path
        if (ROOT / there / 'README.md').is_file():
            there = there / 'README.md'
        if there in pages:
            to = label(there) + '.html' + ('#' + label(there) + '-' + anchor if anchor else '')
        else:
            files.add(there)
            to = copy_of(there)
        return f'<a href="{to}">{found[1]}</a>'

    def picture(found):
        there = Path(os.path.normpath(path.parent / found[2]))
        files.add(there)
        return f'<img src="{copy_of(there)}" alt="{found[1]}" width="100%"/>'

    out, fenced, first = [], False, True
    text = (ROOT / path).read_text()
    if not re.search(r'^# ', text, re.M):
        text = f'# {path.parent}\n\n' + text
    for line in text.split('\n'):
        if line.startswith('```'):
            fenced = not fenced
            line = {'```cpp': '```{.cpp}', '```python': '```{.py}', '```': '```'}.get(line,
                '```{.txt}' if fenced else line)
        elif not fenced and not line.startswith('    '):
            line = re.sub(r'`([^`]*\\\|[^`]*)`', lambda m: '<code>' + m[1].replace('\\|', '&#124;') + '</code>', line)
            line = re.sub(r'!\[([^\]]*)\]\(([^)\s]+)\)', picture, line)
            line = re.sub(r'\[((?:[^\][]|\[[^\]]*\])+)\]\(([^)\s]+)\)', link, line)
            if found := re.match(r'(#+) (.*)', line):
                line += ' {#' + (label(path) if first else label(path) + '-' + slug(found[2])) + '}'
                if first and path == Path('README.md'):
                    line = found[0] + ' {#mainpage}'
                first = False
        out.append(line)
    return '\n'.join(out)


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.names = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for key, value in attributes:
            if key in ('id', 'name') and value:
                self.names.add(value)
            elif key in ('href', 'src') and value:
                self.links.append(value)


def broken_links(site):
    """`PAGE: LINK` for each link within the site that leads nowhere, and how many were followed."""
    pages = {path: Page(path.read_text(errors='replace')) for path in site.rglob('*.html')}
    broken, count = [], 0
    for path, found in pages.items():
        for link in found.links:
            if re.match(r'(https?|javascript|mailto|data):', link):
                continue
            count += 1
            target, _, anchor = unquote(link).partition('#')
            there = Path(os.path.normpath(path.parent / target)) if target else path
            if not there.exists() or anchor and there in pages and anchor not in pages[there].names:
                broken.append(f'{path.relative_to(site)}: {link}')
    return broken, count


def main(include, out):
    include, out = Path(include).absolute(), Path(out).absolute()
    if out.exists() and any(out.iterdir()) and not (out / 'warnings.txt').exists():
        sys.exit(f'docs: error: {out} is there and was not made here; name another directory')
    shutil.rmtree(out, ignore_errors=True)
    stage = out / 'stage'
    for source in sorted(include.rglob('*.h')):
        there = stage / 'hilt' / source.relative_to(include)
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text(header(source.read_text()))
    found = [Path('README.md')] + sorted(p.relative_to(ROOT) for room in ROOMS for p in (ROOT / room).rglob('*.md')
                                         if not re.match(r'third_party/[^/]+/', str(p.relative_to(ROOT))))
    files = set()
    for path in found:
        (stage / path).parent.mkdir(parents=True, exist_ok=True)
        (stage / path).write_text(page(path, set(found), files))
    (stage / 'hilt.dox').write_text('/** @namespace hilt\nAll that the library declares.\n\nWhat an argument must be, '
                                    'its comment says; anything else '
                                     'throws Error with Code::usage. Where another code is thrown, it is named. */\n')
    log = out / 'warnings.txt'
    settings = (HERE / 'Doxyfile').read_text() + f'''
INPUT = "{stage}"
STRIP_FROM_PATH = "{stage}"
STRIP_FROM_INC_PATH = "{stage}"
OUTPUT_DIRECTORY = "{out}"
HTML_OUTPUT = .
HTML_STYLESHEET = "{HERE / 'style.css'}"
WARN_LOGFILE = "{log}"
'''
    settings = settings.replace('= README.md', f'= "{stage}/README.md"')
    subprocess.run(['doxygen', '-'], input=settings, text=True, check=True)
    for path in filter(lambda path: (ROOT / path).is_file(), files):  # else its link is a broken one
        there = out / copy_of(path)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, there)
    warnings = [line.replace(str(stage) + '/', '') for line in dict.fromkeys(log.read_text().splitlines())
                if line.strip()]
    shutil.rmtree(stage)
    for path in out.rglob('*.html'):
        text = re.sub(r'<link (?:rel="stylesheet" type="text/css" )?href="tabs.css".*?>', '', path.read_text())
        text = re.sub(r'<link [^>]*href="(?:search/)?search.css"[^>]*>', '' if path.parent == out else
                      '<link rel="stylesheet" href="../style.css"/>', text)  # style.css alone says how it looks
        if 'name="nested-classes"' not in text:  # Doxygen heads private classes too, and then leaves them out
            text = re.sub(r'<a href="#nested-classes">.*?</a>(?: &#124;)?', '', text)
        path.write_text(text)
    broken, links = broken_links(out)
    for line in warnings + ['broken link: ' + line for line in broken]:
        print(line, file=sys.stderr)
    if warnings or broken:
        sys.exit(f'docs: error: {len(warnings)} warnings, {len(broken)} broken links')
    print(f'docs: {len(found)} pages, {len(list(include.rglob("*.h")))} headers, {links} links checked: '
          f'{out / "index.html"}')


if __name__ == '__main__':
    main(*sys.argv[1:])
